// Which pieces of a batch's attention threads take. Included inside a namespace, after scratch.h.

// Some new slots of one sequence. first_slot: where first_row lies in its sequence; context: where the list of the
// sequence's slots in the cache begins. lent: settled slots in which places are lent, which the list at `borrowed` names; the list
// at `rest` names all others.
struct AttentionTile {
  int64_t first_row, rows, first_slot, context, lent, borrowed, rest;
};

// What a thread does in one go: some KV heads of a tile, of each of which some query heads, [rows, query heads of a KV head].
struct AttentionPiece {
  AttentionTile tile;
  int first_head, last_head, first_query, last_query;
};

constexpr int kFewPieces = 4;  // a thread

struct AttentionPlan {  // the same for all layers
  std::vector<AttentionPiece> pieces;
  std::vector<int64_t> slots;
  const Places* places;  // null where no places are lent

  // A slot's heads lie side by side, so all of them at once are read as one stream; head by head there is more to share
  // out. What comes out is the same.
  AttentionPlan(const Geometry& g, const Batch& batch, int threads) : places(batch.places) {
    const int64_t most = std::max<int64_t>(kMaxQueries / (g.heads / g.kv_heads), 1);
    int64_t row = 0, longest = 0, total = 0;
    for (int64_t i = 0; i < batch.sequences; i++) {
      longest = std::max(longest, batch.context_slots[i]);
      total += batch.context_slots[i];
    }
    const bool many = total >= 2 * threads * longest;
    for (int64_t i = 0; i < batch.sequences; i++) {
      const int64_t queries = batch.query_slots[i], end = batch.context_slots[i];
      const bool at_once = many && queries * g.heads <= kMaxQueries;
      const int64_t context = slots.size(), lent = lent_slots(batch, i);
      for (int64_t done = 0; done < queries; done += most) {
        const int64_t rows = std::min(most, queries - done);
        const AttentionTile tile = {row + done, rows, end - queries + done, context, lent, context + end, context + end + lent};
        for (int head = 0; head < g.kv_heads; head += at_once ? g.kv_heads : 1)
          pieces.push_back({tile, head, at_once ? g.kv_heads : head + 1, 0, static_cast<int>(rows) * (g.heads / g.kv_heads)});
      }
      row += queries;
      const int64_t* block = batch.block_tables + i * batch.table_width;
      for (int64_t slot = 0; slot < end; block++)
        for (int64_t at = 0; at < batch.block_size && slot < end; at++, slot++) slots.push_back(*block * batch.block_size + at);
      if (lent) split_lent(batch, i, context);
    }
    if (!many && longest > kTile) share_last(threads);
  }

 private:
  static int64_t lent_slots(const Batch& batch, int64_t i) {
    return batch.places ? batch.settled_slots[i] / batch.places->kept * batch.places->lent : 0;
  }

  // The last of each chunk's settled slots to a list of their own, and the others to a third.
  void split_lent(const Batch& batch, int64_t i, int64_t context) {
    const int64_t from = batch.settled_from[i], until = from + batch.settled_slots[i], kept = batch.places->kept;
    for (const bool lent : {true, false})
      for (int64_t slot = 0; slot < batch.context_slots[i]; slot++)
        if (lent == (from <= slot && slot < until && (slot - from) % kept >= kept - batch.places->lent))
          slots.push_back(slots[context + slot]);
  }

  // Pieces that are left when each thread has had as many as the others are cut into query heads for all: their keys are then read
  // several times, but no thread waits for another's whole piece.
  void share_last(int threads) {
    const auto number = static_cast<int>(pieces.size()), left = number % threads;
    if (!left || number > kFewPieces * threads) return;
    const std::vector<AttentionPiece> whole(pieces.end() - left, pieces.end());
    pieces.resize(number - left);
    for (const AttentionPiece& piece : whole) {
      const int parts = std::min(threads / left, piece.last_query);
      for (int i = 0; i < parts; i++) {
        pieces.push_back(piece);
        pieces.back().first_query = piece.last_query * i / parts;
        pieces.back().last_query = piece.last_query * (i + 1) / parts;
      }
    }
  }
};
