// Lines of text with delimited fields (CSV, TSV) as numbers and keys.
#pragma once

#include <cstdint>
#include <vector>

#include "sparsekit/parallel.h"

namespace sparsekit {

enum class FieldKind : uint8_t { kSkip, kFloat, kHash, kInteger, kHex };

// Describes how the text of one field of a line is read.
struct Field {
  FieldKind kind = FieldKind::kSkip;

  // kFloat: the number of row i goes to output[i * stride]. An empty field is `missing`, unless it
  // is required.
  float* output = nullptr;
  int64_t stride = 1;
  float missing = 0;
  bool required = false;

  // The others but kSkip: texts between separators are keys of their own; 0: the field is one key.
  // An empty text is no key, an empty field is the key `missing_key` if it has one.
  char separator = 0;
  bool has_missing_key = false;
  int64_t missing_key = 0;
  uint64_t seed = 0;  // of the hash
};

struct TextFormat {
  char delimiter = '\t';
  char quote = 0;  // 0: quotes are text like any other
  int64_t max_line_bytes = 0;
  std::vector<Field> fields;
};

struct Line {
  int64_t begin, end;  // without its newline
};

// A place in a text: outside quoted fields, inside one, or just behind one, where another quote
// goes on with it.
enum class Place : uint8_t { kOutside, kInside, kBehind };

struct FoundLines {
  std::vector<Line> lines;
  int64_t end = 0;        // behind the last one and its newline
  bool unclosed = false;  // the last one ends within a quoted field
};

// The lines that begin in [0, stop) of a text, which begins with one. A line ends with "\n" or
// "\r\n" outside quoted fields, or where the text ends, if that is `complete`; else an unfinished
// one is left out. A field is quoted if it begins with `quote` (0: none is); two quotes in it are
// text. Blank lines are left out if `skip_blank`.
FoundLines find_lines(const char* text, int64_t size, int64_t stop, char delimiter, char quote,
                      bool skip_blank, bool complete);

// Where a line ends that goes on at `begin`: behind its newline, or -1 if that is not in the text.
// `place` is that of `begin`, and afterwards that of the end of the text. The byte before `begin`
// must be there, unless the line begins with the text.
int64_t skip_line(const char* text, int64_t begin, int64_t size, char delimiter, char quote,
                  Place& place);

// Why a line cannot be read.
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
  int32_t field;  // counted from 0
  Malformed why;
};

struct ParsedKeys {
  // Of row i in the f-th of the fields that are keys: as many as offsets[f * rows + i + 1] is
  // higher than the entry before it.
  std::vector<int64_t> offsets;
  // All keys, field by field and in each row by row, if read one part after another.
  std::vector<std::vector<int64_t>> parts;
};

// Reads lines[order[i]] of `text` as row i, for i in [0, rows). A line is read up to its first
// fault, and its row then holds anything.
void parse_lines(const TextFormat& format, const char* text, const Line* lines,
                 const int64_t* order, int64_t rows, ParsedKeys& keys,
                 std::vector<MalformedRow>& malformed, const ParallelFor& parallel_for);

}  // namespace sparsekit
