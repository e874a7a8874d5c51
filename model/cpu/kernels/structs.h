// The structs that Python passes; model/cpu/structs.py mirrors them. Included with STRUCT, FIELD and END defined: common.h declares the
// structs, supports.cpp tells how they are laid out, and Python compares that with its mirrors.

// y = W x + bias, W [outputs, inputs] in blocks of 16 outputs; for each group of 32 inputs a block holds
//   4 bits: 4 x 64 bytes of codes 0 to 15, then 16 scales and 16 zeros in half precision: w = code * scale + zero
//   8 bits: 8 x 64 bytes of codes 1 to 255, then 16 scales: w = (code - 128) * scale
// Byte (i, lane, t) of an 8-bit group is input 4 i + t of output `lane`; in a 4-bit group its low half is input
// 8 i + t and its high half input 8 i + 4 + t.
STRUCT(Weight)
  FIELD(const uint8_t*, data)
  FIELD(const float*, bias)  // or null
  FIELD(int32_t, outputs)
  FIELD(int32_t, inputs)
  FIELD(int32_t, bits)
END

// Low-rank, of a linear (adapter.py); or without data.
STRUCT(Adapter)
  FIELD(Weight, down)
  FIELD(Weight, up)
END

// Rotary tables: rows of cos and sin [*, head_dim], laid out as rotary.py does; nothing turns where cos is null.
STRUCT(Angles)
  FIELD(const float*, cos)
  FIELD(const float*, sin)
  FIELD(const int64_t*, positions)  // [T], whose rows count; null: the first T in order
END

// One MLP of a mixture.
STRUCT(Expert)
  FIELD(Weight, gate_up)
  FIELD(Weight, down)
END

STRUCT(Layer)
  FIELD(const float*, attn_norm)      // [D], or null, as all norms: of what attention reads
  FIELD(const float*, attn_out_norm)  // [D], of what it adds
  FIELD(const float*, mlp_norm)       // [D]
  FIELD(const float*, mlp_out_norm)   // [D]
  FIELD(const float*, q_norm)         // [head_dim], or [heads * head_dim] where norms are wide
  FIELD(const float*, k_norm)         // [head_dim], or [kv_heads * head_dim]
  FIELD(Weight, qkv)
  FIELD(Weight, o)
  FIELD(Weight, gate_up)
  FIELD(Weight, down)
  FIELD(const float*, router)    // [experts, D]; null: the layer has no experts, but gate_up and down
  FIELD(const Expert*, experts)  // [experts]
  FIELD(int32_t, window)  // slots that a slot sees, itself included; 0: all before it
  FIELD(int32_t, angles)  // which of the batch's turn it
END

STRUCT(Geometry)
  FIELD(int32_t, hidden)
  FIELD(int32_t, heads)
  FIELD(int32_t, kv_heads)
  FIELD(int32_t, head_dim)
  FIELD(int32_t, intermediate)  // of layers without experts; 0: there are none
  FIELD(float, eps)
  FIELD(int32_t, wide_norms)  // of q and k over all heads
  FIELD(int32_t, gelu)        // activates the gate, by its tanh form; else SiLU
  FIELD(int32_t, experts)     // of layers that have any; 0: none has
  FIELD(int32_t, experts_per_token)
  FIELD(int32_t, expert_width)
  FIELD(int32_t, sum_to_one)  // the chances of the experts that a slot chooses
END

// The slots that pass some adapters: those of several tokens, or of requests that ask for a LoRA adapter.
STRUCT(Adapted)
  FIELD(int64_t, count)             // N
  FIELD(const int64_t*, rows)       // [N], their places in T, ascending
  FIELD(int64_t, rank)              // the largest of the adapters
  FIELD(const Adapter*, adapters)   // [layers, 4]: of qkv, o, gate_up and down
END

// Whose the places in settled slots are (settled_places.py).
STRUCT(Places)
  FIELD(const int64_t*, lenders)  // [layers, kv_heads, most]
  FIELD(const int64_t*, lends)    // [layers, kv_heads], 0 or 1
  FIELD(int64_t, most)
  FIELD(int64_t, kept)            // slots of a chunk
  FIELD(int64_t, lent)            // the last of these
END

// T new slots of B sequences, as ForwardBatch has them (batch.py).
STRUCT(Batch)
  FIELD(int64_t, slots)
  FIELD(int64_t, sequences)
  FIELD(Angles, angles, [3])            // the main ones, local ones, none
  FIELD(const int64_t*, write_slots)    // [T]
  FIELD(const int64_t*, block_tables)   // [B, table_width]
  FIELD(const int64_t*, context_slots)  // [B]
  FIELD(const int64_t*, query_slots)    // [B]
  FIELD(const Places*, places)          // of settled slots; null, as the next two: none are lent here
  FIELD(const int64_t*, settled_from)   // [B]
  FIELD(const int64_t*, settled_slots)  // [B]
  FIELD(int64_t, table_width)
  FIELD(int64_t, block_size)
  FIELD(int32_t, kv_bits)               // of a number in the cache: 32, float; 16, bfloat16; 8, codes
  FIELD(float* const*, kv_scales)       // of codes: of each layer one for each slot, key or value, and KV head; else null
  FIELD(const int64_t*, emit)           // [M], the slots whose states are read between layers
  FIELD(int64_t, emitting)
  FIELD(float* const*, features)        // of each layer [M, D], to be written, or null; null: none at all
  FIELD(const float*, norm)             // [D], the final norm
  FIELD(const int64_t*, read)           // [S], the slots whose final states are read
  FIELD(int64_t, reading)
  FIELD(float*, states)                 // [S, D], to be written: those states, normed
  FIELD(const Adapted*, adapted)        // [adaptations]; a slot may be in several
  FIELD(int64_t, adaptations)
  FIELD(int64_t*, clock)                // of StageClock, or null
END

// The compositional embedder.
STRUCT(Merger)
  FIELD(Weight, q)
  FIELD(Weight, k)
  FIELD(Weight, v)
  FIELD(Weight, out)
  FIELD(const float*, pos)  // [most tokens of a group, D / 2]
  FIELD(int32_t, hidden)
  FIELD(int32_t, heads)
END

// Of `bits` 8 the head's weight in its packed form, else rows of bfloat16 (16) or floats (32).
STRUCT(Embedding)
  FIELD(const void*, rows)  // [V, D]
  FIELD(int32_t, bits)
  FIELD(int32_t, width)
END

// A head in 8 bits, its copy in 4 bits, and what that is off by (head.h).
STRUCT(Head)
  FIELD(Weight, weight)
  FIELD(Weight, coarse)
  FIELD(const float*, errors)  // [outputs, to a whole block]
END

// What emits groups: the head, and where there is a graft (count > 0) its stop head and micro decoder.
STRUCT(Graft)
  FIELD(Geometry, geometry)
  FIELD(Head, head)                     // of first tokens
  FIELD(const Layer*, layers)           // the micro decoder's
  FIELD(int32_t, count)
  FIELD(int32_t, features)
  FIELD(int32_t, positions)             // that a group has at most in the micro decoder
  FIELD(int32_t, fused)
  FIELD(const float*, feature_norm)     // [features, D]; null unless fused, as the next three
  FIELD(const float*, embedding_norm)   // [D]
  FIELD(Weight, feature_proj)
  FIELD(Weight, embedding_proj)
  FIELD(const float*, norm)             // [D], or null
  FIELD(Weight, stop, [3])
  FIELD(const float*, stop_scale)       // [most tokens of a group]
  FIELD(const float*, stop_bias)        // [most tokens of a group]
  FIELD(Head, micro_head)               // of further tokens
  FIELD(const int64_t*, short_list)     // the ids that micro_head chooses from, ascending; null: all
  FIELD(Embedding, embedding)
  FIELD(const float*, cos)              // [positions, head_dim]
  FIELD(const float*, sin)              // [positions, head_dim]
END

// What rows of a batch change of their logits (batch.py's Adjustments), and the tokens that some may choose at all.
STRUCT(Changes)
  FIELD(int64_t, adjustments)         // A
  FIELD(const int64_t*, adjusted)     // [A], the rows, ascending
  FIELD(const int64_t*, prompt_ids)   // [A, prompts], as the next one padded with -1
  FIELD(int64_t, prompts)
  FIELD(const int64_t*, output_ids)   // [A, outputs]
  FIELD(int64_t, outputs)
  FIELD(const float*, presence)       // [A]
  FIELD(const float*, frequency)      // [A]
  FIELD(const float*, repetition)     // [A]
  FIELD(const int64_t*, bias_row)     // [biases], into A
  FIELD(const int64_t*, bias_id)      // [biases]
  FIELD(const float*, bias)           // [biases]
  FIELD(int64_t, biases)
  FIELD(const int64_t*, min_index)    // [A], before which end tokens are forbidden
  FIELD(const int64_t*, output_index) // [M], of a group's first token
  FIELD(const int64_t*, end_ids)      // [M, ends], padded with -1
  FIELD(int64_t, ends)
  FIELD(int64_t, masks)               // C
  FIELD(const int64_t*, masked)       // [C], the rows, ascending
  FIELD(const uint32_t*, allowed)     // [C, words], a bit for each token
  FIELD(int64_t, words)
END

// M rows that emit.
STRUCT(Emission)
  FIELD(int64_t, rows)
  FIELD(int64_t, width)                 // most tokens of a group
  FIELD(int64_t, ends)                  // of each row
  FIELD(const float*, hidden)           // [M, D]
  FIELD(const float* const*, features)  // of each feature layer [M, D]
  FIELD(const int64_t*, limits)         // [M]
  FIELD(const float*, thresholds)       // [M]; of verified groups the least chance of all drafts so far
  FIELD(const int64_t*, end_ids)        // [M, ends]
  FIELD(const int64_t*, checks)         // [M], of verified groups (ForwardBatch); null of composed ones
  FIELD(const float*, temperatures)     // [M]; null where all are greedy, as then the next four
  FIELD(const int64_t*, top_k)          // [M]; null where no row has a filter, as then the next two: of verified groups alone
  FIELD(const float*, top_p)            // [M]
  FIELD(const float*, min_p)            // [M]
  FIELD(const int64_t*, keys)           // [M, width], of the noise (graft/draw.h)
  FIELD(const Changes*, changes)        // null where no row changes anything: of verified groups, or of one token
  FIELD(int64_t*, token_ids)            // [M, width], zeros
  FIELD(int64_t*, sizes)                // [M]
  FIELD(float*, stops)                  // [M, width], the stop logits; -inf where there is no token. With checks zeros at first:
                                        // of a draft 1 minus its chance
  FIELD(int64_t*, clock)                // of StageClock, or null
END

// A chunk that settles: of C slots some stay.
STRUCT(Settling)
  FIELD(int64_t, layers)
  FIELD(int64_t, kv_heads)
  FIELD(int64_t, head_dim)
  FIELD(int64_t, candidates)    // C
  FIELD(const int64_t*, from)   // [C], the slots
  FIELD(const int64_t*, to)     // [kept], where those go that stay
  FIELD(const Angles*, angles)  // of each layer, C rows in order
  FIELD(const float*, probe)    // [layers, kv_heads, head_dim + 1], or null
  FIELD(const Places*, places)
  FIELD(float, precision)       // scores times this are rounded
  FIELD(int32_t, kv_bits)       // as the next one: of Batch
  FIELD(float* const*, kv_scales)
END
