// Parses lines of text with delimited fields (CSV, TSV) into numbers and keys.
#pragma once

#include <cstdint>
#include <vector>

#include "sparsekit/parallel.h"

namespace sparsekit {

enum class FieldKind : uint8_t { kSkip, kFloat, kHash, kInteger, kHex };

// Options for reading one field of a line.
struct Field {
  FieldKind kind = FieldKind::kSkip;

  // For kFloat: the value of row i is written to output[i * stride]. An empty field gets the value
  // `missing` or, if `required` is set, makes the row malformed.
  float* output = nullptr;
  int64_t stride = 1;
  float missing = 0;
  bool required = false;

  // For the kinds that hold keys: the field is split at `separator`, and each piece becomes a key.
  // If `separator` is 0, the whole field is one key. Empty pieces are skipped. An empty field gives
  // `missing_key` if has_missing_key is set, and no key otherwise.
  char separator = 0;
  bool has_missing_key = false;
  int64_t missing_key = 0;
  uint64_t seed = 0;  // seed of the hash
};

struct TextFormat {
  char delimiter = '\t';
  char quote = 0;  // 0 if quotes have no special meaning
  int64_t max_line_bytes = 0;
  std::vector<Field> fields;
};

struct Line {
  int64_t begin, end;  // range in the text, without the newline
};

// The state of a scan at a position: outside quoted fields, inside a quoted field, or just after a
// quote inside a quoted field. Such a quote ends the field unless another quote follows.
enum class Place : uint8_t { kOutside, kInside, kBehind };

struct FoundLines {
  std::vector<Line> lines;
  int64_t end = 0;        // position after the last line, including its newline
  bool unclosed = false;  // true if the last line ends within a quoted field
};

// Finds the lines that begin in [0, stop). A line must begin at 0. A line ends with "\n" or "\r\n"
// outside quoted fields. If `complete` is true, the end of the text also ends a line; otherwise an
// unfinished last line is left out. A field is quoted if it begins with `quote`; inside it, two
// consecutive quotes stand for one. If `quote` is 0, no field is quoted. Blank lines are left out
// if `skip_blank` is true.
FoundLines find_lines(const char* text, int64_t size, int64_t stop, char delimiter, char quote,
                      bool skip_blank, bool complete);

// Returns the position after the newline that ends the line containing `begin`, or -1 if the text
// ends first. On entry, `place` is the state at `begin`; on return, the state at the end of the
// text. The byte before `begin` must be readable, unless the line begins at 0.
int64_t skip_line(const char* text, int64_t begin, int64_t size, char delimiter, char quote,
                  Place& place);

// Reasons why a line cannot be parsed.
enum class Malformed : int32_t {
  kTooFewFields,
  kTooManyFields,
  kTooLong,
  kOpenQuote,
  kAfterQuote,
  kMissing,
  kNotANumber,
  kNotAnInteger,
  kNotHex,
};
const char* malformed_reason(Malformed why);

struct MalformedRow {
  int64_t row;
  int32_t field;  // zero-based index
  Malformed why;
};

struct ParsedKeys {
  // In row i, field f has offsets[f * rows + i + 1] - offsets[f * rows + i] keys. The number f
  // counts only the fields that hold keys.
  std::vector<int64_t> offsets;
  // Parts that, concatenated, list all keys, ordered by field and then by row.
  std::vector<std::vector<int64_t>> parts;
};

// Parses lines[order[i]] of `text` as row i, for i in [0, rows). Parsing of a line stops at the
// first error; the contents of a malformed row are undefined.
void parse_lines(const TextFormat& format, const char* text, const Line* lines,
                 const int64_t* order, int64_t rows, ParsedKeys& keys,
                 std::vector<MalformedRow>& malformed, const ParallelFor& parallel_for);

}  // namespace sparsekit
