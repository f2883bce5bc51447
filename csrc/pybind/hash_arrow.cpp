#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <string_view>
#include <type_traits>

#include "arrow_texts.h"
#include "cpu/first_bad.h"
#include "hash_parts.h"
#include "hash_values.h"
#include "sparsekit/xxh64.h"

namespace sparsekit {
namespace {

struct Work {
  uint64_t seed;
  int num_threads;
  int64_t missing;  // code of null items, equal to the code of ""
};

// Sets codes[i] to the code of texts(i) for valid items, and to the code of "" for null items.
template <class Texts>
void hash_valid_texts(const ArrowArray& array, const Texts& texts, const Work& work,
                      int64_t* codes) {
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

// Calls visit with a null `const T*`, where T is the integer type that `format` stands for. Returns
// false if `format` does not stand for an integer type.
template <class Visit>
bool with_integer(std::string_view format, const Visit& visit) {
  const auto is = [&](const char* name, const auto* type) {
    if (format == name) visit(type);
    return format == name;
  };
  return is("c", static_cast<const int8_t*>(nullptr)) ||
         is("C", static_cast<const uint8_t*>(nullptr)) ||
         is("s", static_cast<const int16_t*>(nullptr)) ||
         is("S", static_cast<const uint16_t*>(nullptr)) ||
         is("i", static_cast<const int32_t*>(nullptr)) ||
         is("I", static_cast<const uint32_t*>(nullptr)) ||
         is("l", static_cast<const int64_t*>(nullptr)) ||
         is("L", static_cast<const uint64_t*>(nullptr));
}

void hash_integer_array(const char* format, const ArrowArray& array, const Work& work,
                        int64_t* codes) {
  const Validity valid = validity_of(array);
  with_integer(format, [&](auto* type) {
    using Integer = std::remove_const_t<std::remove_pointer_t<decltype(type)>>;
    const Integer* values = buffer_of<Integer>(array, 1) + array.offset;
    split(array.length, work.num_threads, [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        codes[i] = valid(i) ? code_of_integer(values[i], work.seed) : work.missing;
      }
    });
  });
}

bool is_integer(const char* format) {
  return with_integer(format, [](auto*) {});
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

// Returns the reason why an array cannot be read, or null if it can be read. Does not check the
// items. The Arrow interface provides buffer sizes only for arrays of views.
const char* flaw_of(const ArrowSchema& type, const ArrowArray& array) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  if (array.length < 0 || array.offset < 0 || array.offset > kMost / 16 - array.length - 1) {
    return "its length or offset is out of range";
  }
  if (type.dictionary != nullptr && array.dictionary == nullptr) return "it has no dictionary";
  const std::string_view format = type.format;
  if (format == "n" || array.length == 0) return nullptr;  // such an array may have no buffers
  const bool has_views = format[0] == 'v';
  const bool has_offsets = !has_views && std::strchr("uUzZ", format[0]) != nullptr;
  const int64_t expected = has_offsets || has_views ? 3 : 2;
  if (array.buffers == nullptr ||
      (has_views ? array.n_buffers < expected : array.n_buffers != expected)) {
    return "it has another number of buffers than its type";
  }
  const int64_t size = format[0] == 'w' ? std::atoll(type.format + 2) : 1;
  if (size < 0 || size > kMost / (array.offset + array.length)) return "its width is out of range";
  if (array.buffers[1] == nullptr && size > 0) return "it has no buffer of values";
  if (array.buffers[0] == nullptr && array.null_count > 0) return "it has nulls, but no bitmap";
  if (has_views && array.n_buffers > 3 && array.buffers[array.n_buffers - 1] == nullptr) {
    return "it does not tell the sizes of its buffers";
  }
  if (has_offsets && array.buffers[2] == nullptr) {
    const bool large = format[0] == 'U' || format[0] == 'Z';
    const int64_t last = array.offset + array.length;
    const int64_t end =
        large ? buffer_of<int64_t>(array, 1)[last] : int64_t{buffer_of<int32_t>(array, 1)[last]};
    if (end != 0) return "it has no buffer of texts";
  }
  return nullptr;
}

constexpr int64_t kAllGood = -1;

// Hashes strings. Returns the first item whose string is outside the array's memory, or kAllGood.
template <class Offset>
int64_t hash_offset_texts(const ArrowArray& array, const Work& work, int64_t* codes) {
  const Offset* offsets = buffer_of<Offset>(array, 1) + array.offset;
  const char* data = buffer_of<char>(array, 2);
  const auto end =
      static_cast<std::make_unsigned_t<Offset>>(std::max<Offset>(offsets[array.length], 0));
  cpu::FirstBad bad;
  hash_valid_texts(array, OffsetTexts<Offset>{offsets, data, end, &bad}, work, codes);
  return bad.position();
}

int64_t hash_views(const ArrowArray& array, const Work& work, int64_t* codes) {
  const auto last = static_cast<int>(array.n_buffers - 1);
  cpu::FirstBad bad;
  const ViewTexts texts{buffer_of<char>(array, 1) + array.offset * 16, array.buffers + 2,
                        buffer_of<int64_t>(array, last), array.n_buffers - 3, &bad};
  hash_valid_texts(array, texts, work, codes);
  return bad.position();
}

// Hashes an array that has no dictionary. Returns the first item whose string is outside the
// array's memory, or kAllGood.
int64_t hash_plain_array(const char* format_of, const ArrowArray& array, const Work& work,
                         int64_t* codes) {
  if (array.length == 0) return kAllGood;
  const std::string_view format = format_of;
  if (format == "n") {
    std::fill_n(codes, array.length, work.missing);
    return kAllGood;
  }
  if (format == "u" || format == "z") return hash_offset_texts<int32_t>(array, work, codes);
  if (format == "U" || format == "Z") return hash_offset_texts<int64_t>(array, work, codes);
  if (format == "vu" || format == "vz") return hash_views(array, work, codes);
  if (format[0] == 'w') {
    const int64_t size = std::atoll(format_of + 2);
    const FixedTexts texts{buffer_of<char>(array, 1) + array.offset * size, size};
    hash_valid_texts(array, texts, work, codes);
  } else {
    hash_integer_array(format_of, array, work, codes);
  }
  return kAllGood;
}

// Codes for a dictionary's entries. They are kept for all chunks that share the dictionary.
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

// Copies each item's code from `entries`, the codes for a dictionary's entries. Returns the first
// item with an invalid index, or kAllGood.
template <class Index>
int64_t take(const Index* indices, const ArrowArray& array, const std::vector<int64_t>& entries,
             const Work& work, int64_t* codes) {
  const Validity valid = validity_of(array);
  const int64_t* from = entries.data();
  const uint64_t count = entries.size();
  const int64_t missing = work.missing;
  cpu::FirstBad bad;
  split(array.length, work.num_threads, [=, &bad](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto index = static_cast<uint64_t>(indices[i]);  // negative indices become huge
      if (!valid(i)) {
        codes[i] = missing;
      } else if (index < count) {
        codes[i] = from[index];
      } else {
        return bad.report(i);
      }
    }
  });
  return bad.position();
}

constexpr const char* kNoEntry = "names an entry that its dictionary does not have";
constexpr const char* kOutside = "is outside of its column's memory: malformed offsets or views";

// An item that cannot be hashed, and the reason. `position` is kAllGood if all items are good.
struct Fault {
  int64_t position = kAllGood;
  const char* reason = nullptr;
  int64_t entry = kAllGood;  // the item's dictionary entry, if this entry cannot be hashed
};

Fault hash_dictionary_array(const ArrowSchema& type, const ArrowArray& array, const Work& work,
                            Entries* entries, int64_t* codes) {
  if (array.length == 0) return {};
  const ArrowArray& dictionary = *array.dictionary;
  if (!entries->are_of(dictionary)) {
    entries->codes.resize(static_cast<size_t>(dictionary.length));
    const int64_t bad =
        hash_plain_array(type.dictionary->format, dictionary, work, entries->codes.data());
    if (bad != kAllGood) return {0, kOutside, bad};
    entries->buffers.assign(dictionary.buffers, dictionary.buffers + dictionary.n_buffers);
    entries->offset = dictionary.offset;
  }
  int64_t bad = kAllGood;
  with_integer(type.format, [&](auto* index) {
    using Index = std::remove_const_t<std::remove_pointer_t<decltype(index)>>;
    bad = take(buffer_of<Index>(array, 1) + array.offset, array, entries->codes, work, codes);
  });
  return {bad, kNoEntry};
}

// Hashes a chunk. Returns the first item that cannot be hashed, if there is one. May throw
// bad_alloc.
Fault hash_array(const ArrowSchema& type, const ArrowArray& array, const Work& work,
                 Entries* entries, int64_t* codes) {
  if (type.dictionary != nullptr) {
    return hash_dictionary_array(type, array, work, entries, codes);
  }
  return {hash_plain_array(type.format, array, work, codes), kOutside};
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

// Returns true if a chunk can be read. Otherwise sets a Python error about values[first].
bool check_array(const ArrowSchema& type, const ArrowArray& array, int64_t first) {
  const char* flaw = flaw_of(type, array);
  if (flaw == nullptr && array.length > std::numeric_limits<int64_t>::max() - first) {
    flaw = "the lengths of all chunks are out of range";
  }
  if (flaw != nullptr) {
    PyErr_Format(PyExc_ValueError, "values is a malformed Arrow column from values[%lld] on: %s",
                 static_cast<long long>(first), flaw);
    return false;
  }
  return type.dictionary == nullptr || check_array(*type.dictionary, *array.dictionary, first);
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
  return check_array(*type_, *chunk, 0);
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
  int64_t length = 0;
  while (error == 0) {
    ArrowArray chunk{};
    // Release the GIL, since the producer of the chunks may need it on another thread.
    without_gil([&] { error = stream->get_next(stream, &chunk); });
    if (error != 0 || chunk.release == nullptr) break;
    chunks_.push_back(chunk);
    if (!check_array(own_type_, chunk, length)) return false;
    length += chunk.length;
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
  const Work work{seed, num_threads, code_of({}, seed)};
  Fault fault;
  bool no_memory = false;
  without_gil([&] {
    try {
      Entries entries;
      int64_t done = 0;
      for (const ArrowArray& chunk : chunks_) {
        fault = hash_array(*type_, chunk, work, &entries, codes + done);
        if (fault.position != kAllGood) {
          fault.position += done;
          break;
        }
        done += chunk.length;
      }
    } catch (const std::bad_alloc&) {
      no_memory = true;
    }
  });
  if (no_memory) PyErr_NoMemory();
  if (no_memory || fault.position == kAllGood) return !no_memory;
  const auto position = static_cast<long long>(fault.position);
  const auto entry = static_cast<long long>(fault.entry);
  if (fault.entry == kAllGood) {
    PyErr_Format(PyExc_ValueError, "values[%lld] %s", position, fault.reason);
  } else {
    PyErr_Format(PyExc_ValueError, "entry %lld of the dictionary of values[%lld] %s", entry,
                 position, fault.reason);
  }
  return false;
}

}  // namespace sparsekit
