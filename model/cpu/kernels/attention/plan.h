// Which pieces of a batch's attention threads take. Included inside a namespace, after scratch.h.

// Some new slots of one sequence. first_slot: where first_row lies in its sequence; context: where the list of the
// sequence's slots in the cache begins.
struct AttentionTile {
  int64_t first_row, rows, first_slot, context;
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

  // A slot's heads lie side by side, so all of them at once are read as one stream; head by head there is more to share
  // out. What comes out is the same.
  AttentionPlan(const Geometry& g, const Batch& batch, int threads) {
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
      for (int64_t done = 0; done < queries; done += most) {
        const int64_t rows = std::min(most, queries - done);
        const AttentionTile tile = {row + done, rows, end - queries + done, static_cast<int64_t>(slots.size())};
        for (int head = 0; head < g.kv_heads; head += at_once ? g.kv_heads : 1)
          pieces.push_back({tile, head, at_once ? g.kv_heads : head + 1, 0, static_cast<int>(rows) * (g.heads / g.kv_heads)});
      }
      row += queries;
      const int64_t* block = batch.block_tables + i * batch.table_width;
      for (int64_t slot = 0; slot < end; block++)
        for (int64_t at = 0; at < batch.block_size && slot < end; at++, slot++) slots.push_back(*block * batch.block_size + at);
    }
    if (!many && longest > kTile) share_last(threads);
  }

 private:
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
