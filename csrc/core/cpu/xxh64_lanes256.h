// Vectors of four words for the x86-64 engines; see xxh64_together.h. Include after the definition
// of SPARSEKIT_INLINE.

typedef uint64_t Lanes __attribute__((vector_size(32)));
constexpr int kLanes = 4;

// Loads two words of a string.
template <bool kApart>
SPARSEKIT_INLINE __m128i load_two(const WaitingText& text, size_t first, size_t second) {
  if (!kApart) return _mm_loadu_si128(reinterpret_cast<const __m128i*>(text.data + first));
  const __m128i word = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(text.data + first));
  return _mm_castpd_si128(
      _mm_loadh_pd(_mm_castsi128_pd(word), reinterpret_cast<const double*>(text.data + second)));
}

// Loads two words of string 0 and two words of string 2.
template <bool kApart>
SPARSEKIT_INLINE __m256i load_four(const WaitingText* texts, size_t first, size_t second) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(load_two<kApart>(texts[0], first, second)),
                                 load_two<kApart>(texts[2], first, second), 1);
}

template <bool kApart>
SPARSEKIT_INLINE void load_words(const WaitingText* texts, size_t first, size_t second,
                                 Lanes* words) {
  const __m256i even = load_four<kApart>(texts, first, second);
  const __m256i odd = load_four<kApart>(texts + 1, first, second);
  words[0] = reinterpret_cast<Lanes>(_mm256_unpacklo_epi64(even, odd));
  words[1] = reinterpret_cast<Lanes>(_mm256_unpackhi_epi64(even, odd));
}

SPARSEKIT_INLINE Lanes lanes_of(const uint64_t* w) {
  return Lanes{w[0], w[1], w[2], w[3]};
}

SPARSEKIT_INLINE void store_two(__m128i two, const WaitingText* texts, int64_t* codes) {
  _mm_storel_epi64(reinterpret_cast<__m128i*>(codes + texts[0].place), two);
  _mm_storeh_pd(reinterpret_cast<double*>(codes + texts[1].place), _mm_castsi128_pd(two));
}

SPARSEKIT_INLINE void store(Lanes lanes, const WaitingText* texts, int64_t* codes) {
  const auto hashes = reinterpret_cast<__m256i>(lanes);
  store_two(_mm256_castsi256_si128(hashes), texts, codes);
  store_two(_mm256_extracti128_si256(hashes, 1), texts + 2, codes);
}
