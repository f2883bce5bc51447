// Computes XXH64 of strings of equal length, one string per vector lane. Each engine includes this
// file in its own namespace to get hash_together. Before it does so, it defines
//   SPARSEKIT_TARGET, SPARSEKIT_INLINE  attributes of functions, and of inline functions
//   Lanes, kLanes                       a vector of uint64_t, or uint64_t itself; number of lanes
//   kSide                               number of vectors that go through each step side by
//                                       side, to hide the latency of multiplications
//   times(lanes, factor)                returns the product modulo 2^64
//   times_small(lanes, factor)          returns the same for lanes below 2^32
//   load_words<kApart>(texts, first, second, words)
//                                       loads the words at two offsets; unless kApart, second is
//                                       first + 8
//   lanes_of(words)                     returns a vector of kLanes words from memory
//   store(lanes, texts, codes)          writes each lane to codes[place] of its string

// Makes the compiler reload the strings' addresses in each step. If kept, they would fill all
// registers.
SPARSEKIT_INLINE void forget_addresses() {
#if defined(__GNUC__)
  __asm__ volatile("" ::: "memory");
#endif
}

SPARSEKIT_INLINE Lanes all(uint64_t x) {
  return Lanes{} + x;
}

template <int kBits>
SPARSEKIT_INLINE Lanes rotate(Lanes x) {
  return (x << kBits) | (x >> (64 - kBits));
}

SPARSEKIT_INLINE Lanes absorb_word(Lanes accumulator, Lanes word) {
  return times(rotate<31>(accumulator + times(word, kPrime2)), kPrime1);
}

SPARSEKIT_INLINE Lanes merge_lane(Lanes hash, Lanes accumulator) {
  return times(hash ^ absorb_word(all(0), accumulator), kPrime1) + kPrime4;
}

// Hashes the first 32 bytes of each string.
SPARSEKIT_INLINE Lanes hash_stripe(const Lanes* words, uint64_t seed) {
  const Lanes a = absorb_word(all(seed + kPrime1 + kPrime2), words[0]);
  const Lanes b = absorb_word(all(seed + kPrime2), words[1]);
  const Lanes c = absorb_word(all(seed), words[2]);
  const Lanes d = absorb_word(all(seed - kPrime1), words[3]);
  const Lanes hash = rotate<1>(a) + rotate<7>(b) + rotate<12>(c) + rotate<18>(d);
  return merge_lane(merge_lane(merge_lane(merge_lane(hash, a), b), c), d);
}

SPARSEKIT_INLINE Lanes add_word(Lanes hash, Lanes word) {
  return times(rotate<27>(hash ^ absorb_word(all(0), word)), kPrime1) + kPrime4;
}

SPARSEKIT_INLINE Lanes add_four(Lanes hash, Lanes rest) {
  const Lanes mixed = hash ^ times_small(rest & 0xFFFFFFFF, kPrime1);
  return times(rotate<23>(mixed), kPrime2) + kPrime3;
}

SPARSEKIT_INLINE Lanes add_byte(Lanes hash, Lanes rest) {
  return times(rotate<11>(hash ^ times_small(rest & 0xFF, kPrime5)), kPrime1);
}

SPARSEKIT_INLINE Lanes finish_lanes(Lanes hash) {
  hash = times(hash ^ hash >> 33, kPrime2);
  hash = times(hash ^ hash >> 29, kPrime3);
  return hash ^ hash >> 32;
}

// Loads the last `left` bytes of each string, where 1 <= left <= 15. If left >= 8, the first 8 of
// them go into *word. The remaining bytes go into the low bytes of *rest; they are read as part of
// a word that ends where the string ends.
SPARSEKIT_INLINE void load_end(const WaitingText* texts, size_t size, size_t left, Lanes* word,
                               Lanes* rest) {
  if (size < 8) {
    uint64_t words[kLanes];
    for (int k = 0; k < kLanes; ++k) {
      words[k] = load_few(reinterpret_cast<const uint8_t*>(texts[k].data), size);
    }
    *word = *rest = lanes_of(words);
    return;
  }
  Lanes words[2];
  if (left >= 8) {
    load_words<true>(texts, size - left, size - 8, words);
  } else {
    load_words<false>(texts, size - 16, size - 8, words);
  }
  *word = words[0];
  *rest = words[1] >> (64 - 8 * (left % 8)) % 64;
}

SPARSEKIT_INLINE void hash_side(const WaitingText* texts, size_t size, uint64_t seed,
                                int64_t* codes) {
  Lanes hash[kSide], word[kSide], rest[kSide];
  size_t done = 0;
  if (size >= 32) {
#pragma GCC unroll 8
    for (int g = 0; g < kSide; ++g) {
      Lanes words[4];
      load_words<false>(texts + g * kLanes, 0, 8, words);
      load_words<false>(texts + g * kLanes, 16, 24, words + 2);
      hash[g] = hash_stripe(words, seed) + size;
    }
    done = 32;
  } else {
#pragma GCC unroll 8
    for (int g = 0; g < kSide; ++g) hash[g] = all(seed + kPrime5 + size);
  }
  forget_addresses();
  if (size % 32 >= 16) {
#pragma GCC unroll 8
    for (int g = 0; g < kSide; ++g) {
      Lanes words[2];
      load_words<false>(texts + g * kLanes, done, done + 8, words);
      hash[g] = add_word(add_word(hash[g], words[0]), words[1]);
    }
    done += 16;
  }
  forget_addresses();
  if (const size_t left = size - done; left != 0) {
#pragma GCC unroll 8
    for (int g = 0; g < kSide; ++g) {
      load_end(texts + g * kLanes, size, left, &word[g], &rest[g]);
    }
    if (left >= 8) {
#pragma GCC unroll 8
      for (int g = 0; g < kSide; ++g) hash[g] = add_word(hash[g], word[g]);
    }
    if (left & 4) {
#pragma GCC unroll 8
      for (int g = 0; g < kSide; ++g) {
        hash[g] = add_four(hash[g], rest[g]);
        rest[g] = rest[g] >> 32;
      }
    }
    for (size_t bytes = left & 3; bytes > 0; --bytes) {
#pragma GCC unroll 8
      for (int g = 0; g < kSide; ++g) {
        hash[g] = add_byte(hash[g], rest[g]);
        rest[g] = rest[g] >> 8;
      }
    }
  }
  forget_addresses();
#pragma GCC unroll 8
  for (int g = 0; g < kSide; ++g) store(finish_lanes(hash[g]), texts + g * kLanes, codes);
}

SPARSEKIT_TARGET void hash_together(const WaitingText* texts, int count, size_t size, uint64_t seed,
                                    int64_t* codes) {
  for (int k = 0; k < count; k += kSide * kLanes) hash_side(texts + k, size, seed, codes);
}
