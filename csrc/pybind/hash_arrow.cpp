#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string_view>
#include <type_traits>

#include "hash_columns.h"
#include "hash_parts.h"
#include "sparsekit/xxh64_batch.h"

namespace sparsekit {
namespace {

// Each of these gives text i of an array.
template <class Offset>
struct OffsetTexts {
  const Offset* offsets;
  const char* data;
  std::string_view operator()(int64_t i) const {
    using Size = std::make_unsigned_t<Offset>;
    return {data + offsets[i], static_cast<Size>(offsets[i + 1]) - static_cast<Size>(offsets[i])};
  }
};

struct FixedTexts {
  const char* data;
  int64_t size;
  std::string_view operator()(int64_t i) const {
    return {data + i * size, static_cast<size_t>(size)};
  }
};

// 16 bytes each: the length, and then the text itself if it has at most 12 bytes, or else its first
// four, the number of the buffer and the offset in it.
struct ViewTexts {
  const char* views;
  const void* const* data;
  std::string_view operator()(int64_t i) const {
    int32_t view[4];
    std::memcpy(view, views + i * 16, sizeof view);
    const auto size = static_cast<size_t>(view[0]);
    if (size <= 12) return {views + i * 16 + 4, size};
    return {static_cast<const char*>(data[view[2]]) + view[3], size};
  }
};

// Which items are there, from an offset on; all of them without a bitmap.
struct Validity {
  const uint8_t* bits;
  int64_t offset;
  bool operator()(int64_t i) const {
    i += offset;
    return bits == nullptr || (bits[i >> 3] >> (i & 7) & 1) != 0;
  }
};

Validity validity_of(const ArrowArray& array) {
  return {static_cast<const uint8_t*>(array.buffers[0]), array.offset};
}

template <class T>
const T* buffer_of(const ArrowArray& array, int which) {
  return static_cast<const T*>(array.buffers[which]);
}

struct Work {
  uint64_t seed;
  int num_threads;
  int64_t missing;  // code of ""
};

// codes[i] = code(i) of all items that are there.
template <class Code>
void hash_valid(const ArrowArray& array, const Code& code, const Work& work, int64_t* codes) {
  const Validity valid = validity_of(array);
  const int64_t missing = work.missing;
  split(array.length, work.num_threads, [=](int64_t begin, int64_t end) {
    if (valid.bits == nullptr) {
      for (int64_t i = begin; i < end; ++i) codes[i] = code(i);
    } else {
      for (int64_t i = begin; i < end; ++i) codes[i] = valid(i) ? code(i) : missing;
    }
  });
}

template <class Texts>
void hash_valid_texts(const ArrowArray& array, Texts texts, const Work& work, int64_t* codes) {
  const Validity valid = validity_of(array);
  const uint64_t seed = work.seed;
  share(array.length, work.num_threads, [=](Chunks& chunks) {
    if (valid.bits == nullptr) {
      hash_texts(texts, chunks, seed, codes);
    } else {
      const auto text_or_none = [=](int64_t i) { return valid(i) ? texts(i) : std::string_view(); };
      hash_texts(text_or_none, chunks, seed, codes);
    }
  });
}

// Calls visit with a null pointer of the integer type of a format; false if it is none.
template <class Visit>
bool with_integer(char format, const Visit& visit) {
  switch (format) {
    case 'c':
      visit(static_cast<const int8_t*>(nullptr));
      return true;
    case 'C':
      visit(static_cast<const uint8_t*>(nullptr));
      return true;
    case 's':
      visit(static_cast<const int16_t*>(nullptr));
      return true;
    case 'S':
      visit(static_cast<const uint16_t*>(nullptr));
      return true;
    case 'i':
      visit(static_cast<const int32_t*>(nullptr));
      return true;
    case 'I':
      visit(static_cast<const uint32_t*>(nullptr));
      return true;
    case 'l':
      visit(static_cast<const int64_t*>(nullptr));
      return true;
    case 'L':
      visit(static_cast<const uint64_t*>(nullptr));
      return true;
    default:
      return false;
  }
}

void hash_integer_array(char format, const ArrowArray& array, const Work& work, int64_t* codes) {
  with_integer(format, [&](auto* type) {
    using Integer = std::remove_const_t<std::remove_pointer_t<decltype(type)>>;
    const Integer* values = buffer_of<Integer>(array, 1) + array.offset;
    const auto code = [values, seed = work.seed](int64_t i) {
      return code_of_integer(values[i], seed);
    };
    hash_valid(array, code, work, codes);
  });
}

bool is_integer(const char* format) {
  return std::strlen(format) == 1 && std::strchr("cCsSiIlL", format[0]) != nullptr;
}

bool is_known(const ArrowSchema& type) {
  if (type.dictionary != nullptr) {
    return is_integer(type.format) && !type.dictionary->dictionary && is_known(*type.dictionary);
  }
  const std::string_view format = type.format;
  for (const char* text : {"u", "z", "U", "Z", "vu", "vz", "n"}) {
    if (format == text) return true;
  }
  return is_integer(type.format) || format.substr(0, 2) == "w:";
}

void hash_plain_array(const char* format_of, const ArrowArray& array, const Work& work,
                      int64_t* codes) {
  if (array.length == 0) return;  // it may have no buffers
  const std::string_view format = format_of;
  const int64_t first = array.offset;
  if (format == "n") {
    std::fill_n(codes, array.length, work.missing);
  } else if (format == "u" || format == "z") {
    const OffsetTexts<int32_t> texts{buffer_of<int32_t>(array, 1) + first,
                                     buffer_of<char>(array, 2)};
    hash_valid_texts(array, texts, work, codes);
  } else if (format == "U" || format == "Z") {
    const OffsetTexts<int64_t> texts{buffer_of<int64_t>(array, 1) + first,
                                     buffer_of<char>(array, 2)};
    hash_valid_texts(array, texts, work, codes);
  } else if (format == "vu" || format == "vz") {
    hash_valid_texts(array, ViewTexts{buffer_of<char>(array, 1) + first * 16, array.buffers + 2},
                     work, codes);
  } else if (format[0] == 'w') {
    const int64_t size = std::atoll(format_of + 2);
    hash_valid_texts(array, FixedTexts{buffer_of<char>(array, 1) + first * size, size}, work,
                     codes);
  } else {
    hash_integer_array(format[0], array, work, codes);
  }
}

// The codes of a dictionary, kept for chunks that share it.
struct Entries {
  std::vector<const void*> buffers;
  int64_t offset = -1;
  std::vector<int64_t> codes;

  bool are_of(const ArrowArray& dictionary) const {
    return offset == dictionary.offset && static_cast<int64_t>(codes.size()) == dictionary.length &&
           std::equal(buffers.begin(), buffers.end(), dictionary.buffers,
                      dictionary.buffers + dictionary.n_buffers);
  }
};

constexpr int64_t kAllGood = -1;

// The first index that names no entry, or kAllGood.
template <class Index>
int64_t take(const Index* indices, const ArrowArray& array, const std::vector<int64_t>& entries,
             const Work& work, int64_t* codes) {
  const Validity valid = validity_of(array);
  const int64_t* from = entries.data();
  const uint64_t count = entries.size();
  const int64_t missing = work.missing;
  std::atomic<int64_t> first_bad{array.length};
  split(array.length, work.num_threads, [=, &first_bad](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto index = static_cast<uint64_t>(indices[i]);  // a negative one is huge
      if (!valid(i)) {
        codes[i] = missing;
      } else if (index < count) {
        codes[i] = from[index];
      } else {
        keep_first(first_bad, i);
        return;
      }
    }
  });
  return first_bad == array.length ? kAllGood : first_bad.load();
}

int64_t hash_dictionary_array(const ArrowSchema& type, const ArrowArray& array, const Work& work,
                              Entries* entries, int64_t* codes) {
  if (array.length == 0) return kAllGood;
  const ArrowArray& dictionary = *array.dictionary;
  if (!entries->are_of(dictionary)) {
    entries->codes.resize(static_cast<size_t>(dictionary.length));
    hash_plain_array(type.dictionary->format, dictionary, work, entries->codes.data());
    entries->buffers.assign(dictionary.buffers, dictionary.buffers + dictionary.n_buffers);
    entries->offset = dictionary.offset;
  }
  int64_t bad = kAllGood;
  with_integer(type.format[0], [&](auto* index) {
    using Index = std::remove_const_t<std::remove_pointer_t<decltype(index)>>;
    bad = take(buffer_of<Index>(array, 1) + array.offset, array, entries->codes, work, codes);
  });
  return bad;
}

// The position of an index that names no entry of its dictionary, or kAllGood. May throw bad_alloc.
int64_t hash_array(const ArrowSchema& type, const ArrowArray& array, const Work& work,
                   Entries* entries, int64_t* codes) {
  if (type.dictionary != nullptr) {
    return hash_dictionary_array(type, array, work, entries, codes);
  }
  hash_plain_array(type.format, array, work, codes);
  return kAllGood;
}

bool check_type(const ArrowSchema& type) {
  if (is_known(type)) return true;
  const ArrowSchema* values = &type;
  while (values->dictionary != nullptr) values = values->dictionary;
  PyErr_Format(PyExc_TypeError,
               "values is an Arrow column of format '%s'; expected strings, binary, integers or a "
               "dictionary of these",
               values->format);
  return false;
}

bool refuse_released() {
  PyErr_SetString(PyExc_ValueError, "values is an Arrow column that has been released");
  return false;
}

}  // namespace

ArrowColumn::~ArrowColumn() {
  for (ArrowArray& chunk : chunks_) {
    if (chunk.release != nullptr) chunk.release(&chunk);
  }
  if (own_type_.release != nullptr) own_type_.release(&own_type_);
}

bool ArrowColumn::open_array(PyObject* schema, PyObject* array) {
  type_ = static_cast<ArrowSchema*>(PyCapsule_GetPointer(schema, "arrow_schema"));
  const auto* chunk = static_cast<ArrowArray*>(PyCapsule_GetPointer(array, "arrow_array"));
  if (type_ == nullptr || chunk == nullptr) return false;
  if (type_->release == nullptr || chunk->release == nullptr) return refuse_released();
  if (!check_type(*type_)) return false;
  chunks_.push_back(*chunk);
  chunks_.back().release = nullptr;
  return true;
}

bool ArrowColumn::open_stream(PyObject* capsule) {
  auto* stream =
      static_cast<ArrowArrayStream*>(PyCapsule_GetPointer(capsule, "arrow_array_stream"));
  if (stream == nullptr) return false;
  if (stream->release == nullptr) return refuse_released();
  int error = stream->get_schema(stream, &own_type_);
  if (error == 0) {
    type_ = &own_type_;
    if (!check_type(own_type_)) return false;
  }
  while (error == 0) {
    ArrowArray chunk{};
    // What makes the chunks may need the GIL on another thread.
    without_gil([&] { error = stream->get_next(stream, &chunk); });
    if (error != 0 || chunk.release == nullptr) break;
    chunks_.push_back(chunk);
  }
  if (error == 0) return true;
  const char* why = stream->get_last_error(stream);
  PyErr_Format(PyExc_OSError, "values could not be read: %s", why ? why : std::strerror(error));
  return false;
}

int64_t ArrowColumn::length() const {
  int64_t length = 0;
  for (const ArrowArray& chunk : chunks_) length += chunk.length;
  return length;
}

bool ArrowColumn::hash(uint64_t seed, int num_threads, int64_t* codes) const {
  if (!check_num_threads(num_threads)) return false;
  const Work work{seed, num_threads, code_of({}, seed)};
  int64_t bad = kAllGood;
  bool no_memory = false;
  without_gil([&] {
    try {
      Entries entries;
      int64_t done = 0;
      for (const ArrowArray& chunk : chunks_) {
        bad = hash_array(*type_, chunk, work, &entries, codes + done);
        if (bad != kAllGood) {
          bad += done;
          break;
        }
        done += chunk.length;
      }
    } catch (const std::bad_alloc&) {
      no_memory = true;
    }
  });
  if (no_memory) PyErr_NoMemory();
  if (bad != kAllGood) {
    PyErr_Format(PyExc_ValueError, "values[%lld] names an entry that its dictionary does not have",
                 static_cast<long long>(bad));
  }
  return !no_memory && bad == kAllGood;
}

}  // namespace sparsekit
