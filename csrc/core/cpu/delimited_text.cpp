#include "sparsekit/delimited_text.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstring>
#ifdef __SSE2__
#include <emmintrin.h>
#endif
#include <string>
#include <string_view>

#include "sparsekit/xxh64.h"

namespace sparsekit {
namespace {

// Minimum number of rows per thread.
constexpr int64_t kRowsPerPart = 256;

constexpr std::array<int8_t, 256> hex_values() {
  std::array<int8_t, 256> values{};
  for (int c = 0; c < 256; ++c) {
    values[static_cast<size_t>(c)] = static_cast<int8_t>(c >= '0' && c <= '9'   ? c - '0'
                                                         : c >= 'a' && c <= 'f' ? c - 'a' + 10
                                                         : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                                                                : -1);
  }
  return values;
}
constexpr std::array<int8_t, 256> kHexValues = hex_values();

bool read_hex(std::string_view text, int64_t& key) {
  if (text.size() > 16) return false;
  uint64_t bits = 0;
  int signs = 0;
  for (const char c : text) {
    const int digit = kHexValues[static_cast<uint8_t>(c)];
    signs |= digit;
    bits = bits << 4 | static_cast<uint64_t>(digit & 15);
  }
  key = static_cast<int64_t>(bits);
  return signs >= 0;
}

// Removes a leading plus sign, which std::from_chars does not accept.
std::string_view without_plus(std::string_view text) {
  const bool plus = text.size() > 1 && text[0] == '+' && text[1] != '-';
  return plus ? text.substr(1) : text;
}

bool read_integer(std::string_view text, int64_t& key) {
  text = without_plus(text);
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), key);
  return error == std::errc{} && end == text.data() + text.size();
}

// Parses an integer of a few digits. Most numbers have this form and do not need the general
// parser.
bool read_short_integer(std::string_view text, float& number) {
  const bool negative = !text.empty() && text[0] == '-';
  if (negative) text.remove_prefix(1);
  if (text.empty() || text.size() > 9) return false;
  uint32_t value = 0;
  for (const char c : text) {
    const auto digit = static_cast<uint32_t>(c) - '0';
    if (digit > 9) return false;
    value = value * 10 + digit;
  }
  number = static_cast<float>(negative ? -static_cast<double>(value) : static_cast<double>(value));
  return true;
}

bool read_float(std::string_view text, float& number) {
  if (read_short_integer(text, number)) return true;
  text = without_plus(text);
  double wide = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), wide);
  number = static_cast<float>(wide);
  return error == std::errc{} && end == text.data() + text.size() && std::isfinite(number);
}

// Returns the position of the first `wanted` in [p, end), or end. Compares eight bytes at a time,
// since fields are short.
const char* find_byte(const char* p, const char* end, char wanted) {
  constexpr uint64_t kOnes = 0x0101010101010101u;
  const uint64_t pattern = kOnes * static_cast<uint8_t>(wanted);
  for (; end - p >= 8; p += 8) {
    uint64_t word = 0;
    for (int i = 0; i < 8; ++i) word |= uint64_t{static_cast<uint8_t>(p[i])} << (8 * i);
    word ^= pattern;
    // The lowest set bit marks the first zero byte. Higher bits may be set for nonzero bytes.
    const uint64_t zeros = (word - kOnes) & ~word & kOnes << 7;
    if (zeros != 0) return p + (__builtin_ctzll(zeros) >> 3);
  }
  while (p < end && *p != wanted) ++p;
  return p;
}

// Returns a mask with bit i set if p[i] == wanted, for i in [0, 64).
uint64_t find_in_64(const char* p, char wanted) {
  uint64_t mask = 0;
#ifdef __SSE2__
  const __m128i pattern = _mm_set1_epi8(wanted);
  for (int i = 0; i < 64; i += 16) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i));
    const int found = _mm_movemask_epi8(_mm_cmpeq_epi8(bytes, pattern));
    mask |= uint64_t{static_cast<uint32_t>(found)} << i;
  }
#else
  for (int i = 0; i < 64; ++i) mask |= uint64_t{p[i] == wanted} << i;
#endif
  return mask;
}

// Returns a mask with bit i set if bits [0, i] contain an odd number of ones.
uint64_t parity_up_to(uint64_t bits) {
  for (int shift = 1; shift < 64; shift *= 2) bits ^= bits << shift;
  return bits;
}

// Calls on_newline(position) for each newline that ends a line, until a call returns false. Returns
// true if no call returned false. The other arguments are the same as in skip_line.
template <typename OnNewline>
bool scan_lines(const char* text, int64_t begin, int64_t size, char delimiter, char quote,
                Place& place, const OnNewline& on_newline) {
  for (int64_t base = begin; base < size; base += 64) {
    const int64_t count = std::min<int64_t>(64, size - base);
    const char* bytes = text + base;
    char padded[64] = {};
    if (count < 64)
      bytes = static_cast<char*>(std::memcpy(padded, bytes, static_cast<size_t>(count)));
    uint64_t newlines = find_in_64(bytes, '\n');
    if (quote != 0) {
      uint64_t quotes = find_in_64(bytes, quote);
      uint64_t inside = parity_up_to(quotes) ^ (place == Place::kInside ? ~uint64_t{0} : 0);
      const auto begins_field = [&](int i) {
        if (base + i == 0) return true;
        const char before = text[base + i - 1];
        if (before == delimiter || before == '\n') return true;
        return i > 0 ? (quotes >> (i - 1) & 1) != 0 : place == Place::kBehind;
      };
      for (uint64_t opening = quotes & inside; opening != 0;) {
        const int i = __builtin_ctzll(opening);
        opening &= opening - 1;
        if (begins_field(i)) continue;
        // This quote is within an unquoted field, where it is an ordinary character. Undo its
        // effect on all later bytes.
        quotes ^= uint64_t{1} << i;
        inside ^= ~uint64_t{0} << i;
        opening = quotes & inside & ~uint64_t{0} << i;
      }
      newlines &= ~inside;
      place = inside >> 63 != 0                  ? Place::kInside
              : (quotes >> (count - 1) & 1) != 0 ? Place::kBehind
                                                 : Place::kOutside;
    }
    for (; newlines != 0; newlines &= newlines - 1) {
      if (!on_newline(base + __builtin_ctzll(newlines))) return false;
    }
  }
  return true;
}

// Parses the rows [begin, end) of a call.
class Part {
 public:
  Part(const TextFormat& format, const char* text, const Line* lines, const int64_t* order,
       int64_t rows, int64_t* counts)
      : format_(format), text_(text), lines_(lines), order_(order), rows_(rows), counts_(counts) {}

  void parse(int64_t begin, int64_t end) {
    for (const Field& field : format_.fields) {
      if (field.kind == FieldKind::kSkip || field.kind == FieldKind::kFloat) continue;
      keys.emplace_back().reserve(static_cast<size_t>(end - begin));
    }
    for (row_ = begin; row_ < end; ++row_) {
      const Line line = lines_[order_[row_]];
      parse_line(text_ + line.begin, text_ + line.end);
    }
  }

  std::vector<std::vector<int64_t>> keys;  // one vector for each field that holds keys
  std::vector<MalformedRow> malformed;

 private:
  void parse_line(const char* p, const char* end) {
    if (end - p > format_.max_line_bytes) return fail(0, Malformed::kTooLong);
    const auto count = static_cast<int32_t>(format_.fields.size());
    size_t key_field = 0;
    for (int32_t i = 0; i < count; ++i, ++p) {
      std::string_view text;
      if (format_.quote != 0 && p < end && *p == format_.quote) {
        Malformed why{};
        if (!read_quoted(p, end, text, why)) return fail(i, why);
      } else {
        const char* const begin = p;
        p = find_byte(p, end, format_.delimiter);
        text = {begin, static_cast<size_t>(p - begin)};
      }
      if (!read_field(format_.fields[static_cast<size_t>(i)], text, i, key_field)) return;
      if (p == end && i + 1 < count) return fail(i + 1, Malformed::kTooFewFields);
      if (p < end && i + 1 == count) return fail(count, Malformed::kTooManyFields);
    }
  }

  // Parses a quoted field and moves p past the closing quote. Two consecutive quotes stand for one.
  bool read_quoted(const char*& p, const char* end, std::string_view& text, Malformed& why) {
    const char* const begin = ++p;
    p = find_byte(p, end, format_.quote);
    text = {begin, static_cast<size_t>(p - begin)};
    if (end - p > 1 && p[1] == format_.quote) {
      unquoted_.assign(text);
      while (end - p > 1 && p[1] == format_.quote) {
        const char* const close = find_byte(p + 2, end, format_.quote);
        unquoted_.append(p + 1, close);
        p = close;
      }
      text = unquoted_;
    }
    if (p == end) return why = Malformed::kOpenQuote, false;
    ++p;
    return p == end || *p == format_.delimiter || (why = Malformed::kAfterQuote, false);
  }

  bool read_field(const Field& field, std::string_view text, int32_t i, size_t& key_field) {
    if (field.kind == FieldKind::kSkip) return true;
    if (field.kind == FieldKind::kFloat) return read_number(field, text, i);
    std::vector<int64_t>& of_field = keys[key_field];
    const size_t before = of_field.size();
    if (text.empty()) {
      if (field.has_missing_key) of_field.push_back(field.missing_key);
    } else if (field.separator == 0) {
      if (!read_key(field, text, i, of_field)) return false;
    } else {
      const char* const end = text.data() + text.size();
      for (const char* p = text.data(); p <= end; ++p) {
        const char* const stop = find_byte(p, end, field.separator);
        const auto size = static_cast<size_t>(stop - p);
        if (size != 0 && !read_key(field, {p, size}, i, of_field)) return false;
        p = stop;
      }
    }
    counts_[static_cast<int64_t>(key_field++) * rows_ + row_] =
        static_cast<int64_t>(of_field.size() - before);
    return true;
  }

  bool read_number(const Field& field, std::string_view text, int32_t i) {
    float& number = field.output[row_ * field.stride];
    if (text.empty()) {
      if (field.required) return fail(i, Malformed::kMissing), false;
      number = field.missing;
      return true;
    }
    return read_float(text, number) || (fail(i, Malformed::kNotANumber), false);
  }

  bool read_key(const Field& field, std::string_view text, int32_t i, std::vector<int64_t>& keys) {
    int64_t key = 0;
    switch (field.kind) {
      case FieldKind::kHex:
        if (!read_hex(text, key)) return fail(i, Malformed::kNotHex), false;
        break;
      case FieldKind::kInteger:
        if (!read_integer(text, key)) return fail(i, Malformed::kNotAnInteger), false;
        break;
      default:
        key = static_cast<int64_t>(xxh64(text.data(), text.size(), field.seed));
    }
    keys.push_back(key);
    return true;
  }

  void fail(int32_t field, Malformed why) { malformed.push_back({row_, field, why}); }

  const TextFormat& format_;
  const char* text_;
  const Line* lines_;
  const int64_t* order_;
  int64_t rows_;
  int64_t* counts_;
  int64_t row_ = 0;
  std::string unquoted_;
};

}  // namespace

FoundLines find_lines(const char* text, int64_t size, int64_t stop, char delimiter, char quote,
                      bool skip_blank, bool complete) {
  FoundLines found;
  const auto add = [&](int64_t end) {
    const int64_t begin = found.end;
    if (end > begin && text[end - 1] == '\r') --end;
    if (end > begin || !skip_blank) found.lines.push_back({begin, end});
  };
  Place place = Place::kOutside;
  const bool unfinished = scan_lines(text, 0, size, delimiter, quote, place, [&](int64_t newline) {
    add(newline);
    found.end = newline + 1;
    return found.end < stop;
  });
  if (unfinished && complete && found.end < size) {
    add(size);
    found.end = size;
    found.unclosed = place == Place::kInside;
  }
  return found;
}

int64_t skip_line(const char* text, int64_t begin, int64_t size, char delimiter, char quote,
                  Place& place) {
  int64_t end = -1;
  scan_lines(text, begin, size, delimiter, quote, place, [&](int64_t newline) {
    end = newline + 1;
    return false;
  });
  return end;
}

const char* malformed_reason(Malformed why) {
  switch (why) {
    case Malformed::kTooFewFields:
      return "too few fields";
    case Malformed::kTooManyFields:
      return "too many fields";
    case Malformed::kTooLong:
      return "too long a line";
    case Malformed::kOpenQuote:
      return "a quote that is not closed";
    case Malformed::kAfterQuote:
      return "text after the closing quote";
    case Malformed::kMissing:
      return "an empty field";
    case Malformed::kNotANumber:
      return "not a finite number of float32";
    case Malformed::kNotAnInteger:
      return "not a 64-bit integer";
    case Malformed::kNotHex:
      return "not a hexadecimal number of at most 16 digits";
  }
  return "unknown";
}

void parse_lines(const TextFormat& format, const char* text, const Line* lines,
                 const int64_t* order, int64_t rows, ParsedKeys& keys,
                 std::vector<MalformedRow>& malformed, const ParallelFor& parallel_for) {
  const auto is_key = [](const Field& field) {
    return field.kind != FieldKind::kSkip && field.kind != FieldKind::kFloat;
  };
  const int64_t key_fields = std::count_if(format.fields.begin(), format.fields.end(), is_key);
  keys.offsets.assign(static_cast<size_t>(key_fields * rows + 1), 0);
  const int64_t count =
      std::clamp<int64_t>(rows / kRowsPerPart, 1, std::max(parallel_for.num_threads(), 1));
  std::vector<Part> parts(static_cast<size_t>(count),
                          Part(format, text, lines, order, rows, keys.offsets.data() + 1));
  parallel_for.each(count, [&](int64_t p) {
    parts[static_cast<size_t>(p)].parse(rows * p / count, rows * (p + 1) / count);
  });
  for (size_t i = 1; i < keys.offsets.size(); ++i) keys.offsets[i] += keys.offsets[i - 1];
  for (size_t field = 0; field < static_cast<size_t>(key_fields); ++field) {
    for (Part& part : parts) keys.parts.push_back(std::move(part.keys[field]));
  }
  for (const Part& part : parts) {
    malformed.insert(malformed.end(), part.malformed.begin(), part.malformed.end());
  }
}

}  // namespace sparsekit
