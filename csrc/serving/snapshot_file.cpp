#include "serving/snapshot_file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <unordered_set>

#include "serving/file_memory.h"
#include "serving/message.h"
#include "serving/verify.h"

namespace sparsekit::serving {
namespace {

uint64_t round_up(uint64_t bytes, uint64_t to) {
  return (bytes + to - 1) / to * to;
}

// Returns true if n items of `size` bytes, starting at `offset`, fit within [begin, end).
bool fits(uint64_t offset, uint64_t n, uint64_t size, uint64_t begin, uint64_t end) {
  return offset >= begin && offset <= end && n <= (end - offset) / size;
}

int check_header(const char* path, const SnapshotHeader& header, uint64_t file_bytes) {
  if (std::memcmp(header.magic, kSnapshotMagic, sizeof header.magic) != 0) {
    return fail(SK_DAMAGED, "%s: not a snapshot: it does not begin with the magic bytes", path);
  }
  // Check the version first: a newer format may have its checksum elsewhere.
  if (header.format_version > kFormatVersion) {
    return fail(SK_NEWER_FORMAT, "%s: format %u; this library knows formats up to %u", path,
                header.format_version, kFormatVersion);
  }
  const uint32_t crc = sk_crc32(0, &header, offsetof(SnapshotHeader, crc));
  if (crc != header.crc) {
    return fail(SK_DAMAGED, "%s: the header has the checksum %08x, not %08x", path, crc,
                header.crc);
  }
  const auto wrong = [=](const char* field, uint64_t value) {
    return fail(SK_DAMAGED, "%s: the header's %s is %llu", path, field,
                static_cast<unsigned long long>(value));
  };
  if (header.format_version == 0) return wrong("format_version", header.format_version);
  if (header.file_bytes != file_bytes) {
    return fail(SK_DAMAGED, "%s: %llu bytes, but the header says %llu; the file may be cut off",
                path, static_cast<unsigned long long>(file_bytes),
                static_cast<unsigned long long>(header.file_bytes));
  }
  if (header.num_tables > kMostTables) return wrong("num_tables", header.num_tables);
  if (!fits(kPage, header.directory_bytes, 1, kPage, file_bytes) ||
      !fits(kPage, header.num_tables, sizeof(TableRecord), kPage, kPage + header.directory_bytes)) {
    return wrong("directory_bytes", header.directory_bytes);
  }
  const uint64_t begin = kPage + header.num_tables * sizeof(TableRecord);
  const uint64_t end = kPage + header.directory_bytes;
  if (header.note_bytes > 0 && !fits(header.note_offset, header.note_bytes, 1, begin, end)) {
    return wrong("note_bytes", header.note_bytes);
  }
  return SK_OK;
}

// Checks that a name is UTF-8 and can be a C string.
bool is_name(const uint8_t* text, uint64_t bytes) {
  for (uint64_t i = 0; i < bytes;) {
    const uint8_t lead = text[i];
    const int length = lead < 0x80 ? 1 : lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
    if (lead == 0 || length == 0 || lead > 0xF4 || bytes - i < static_cast<uint64_t>(length)) {
      return false;
    }
    for (int j = 1; j < length; ++j) {
      if ((text[i + j] & 0xC0) != 0x80) return false;
    }
    // Reject overlong forms, surrogates, and numbers beyond Unicode.
    const uint8_t second = length > 1 ? text[i + 1] : 0;
    if ((lead == 0xE0 && second < 0xA0) || (lead == 0xED && second > 0x9F) ||
        (lead == 0xF0 && second < 0x90) || (lead == 0xF4 && second > 0x8F)) {
      return false;
    }
    i += length;
  }
  return true;
}

// Checks a table's record; any number in it may be hostile.
int check_record(const char* path, const TableRecord& record, const char* name,
                 const SnapshotHeader& header) {
  const auto wrong = [=](const char* field, uint64_t value) {
    return fail(SK_DAMAGED, "%s: table \"%s\": its %s is %llu", path, name, field,
                static_cast<unsigned long long>(value));
  };
  const uint64_t begin = kPage + header.directory_bytes, end = header.file_bytes;
  if (record.row_format > SK_INT4) return wrong("row_format", record.row_format);
  const int64_t row_bytes = sk_row_bytes(static_cast<int32_t>(record.row_format), record.dim);
  if (row_bytes == 0) return wrong("dim", record.dim);
  if (record.row_bytes != row_bytes) return wrong("row_bytes", record.row_bytes);
  if (record.num_rows > kMostRows) return wrong("num_rows", record.num_rows);
  if (record.num_buckets == 0) return wrong("num_buckets", record.num_buckets);
  if (record.index_offset % kPage != 0 ||
      !fits(record.index_offset, record.num_buckets, sizeof(Bucket), begin, end)) {
    return wrong("index_offset", record.index_offset);
  }
  if (record.num_rows > kSlotsPerBucket * record.num_buckets) {
    return wrong("num_rows", record.num_rows);
  }
  if (record.rows_offset % kPage != 0 ||
      !fits(record.rows_offset, record.num_rows, row_bytes, begin, end)) {
    return wrong("rows_offset", record.rows_offset);
  }
  if (record.miss > SK_MISS_ERROR) return wrong("miss", record.miss);
  if (record.distribution > static_cast<uint32_t>(Distribution::kNormal)) {
    return wrong("distribution", record.distribution);
  }
  if (record.combiner > SK_MAX) return wrong("combiner", record.combiner);
  if (record.has_padding_key > 1) return wrong("has_padding_key", record.has_padding_key);
  if (record.num_fallbacks > kMostRows ||
      (record.miss == SK_MISS_FALLBACK && record.num_fallbacks == 0)) {
    return wrong("num_fallbacks", record.num_fallbacks);
  }
  return SK_OK;
}

// Reads the directory and checks it.
int read_directory(SnapshotFile* file) {
  const char* path = file->path.c_str();
  const SnapshotHeader& header = file->header;
  const size_t bytes = kPage + header.directory_bytes;
  const Memory mapped(mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, file->file.descriptor(), 0),
                      bytes);
  if (!mapped) return fail_of_system(path, "map its directory");
  const auto* start = static_cast<const uint8_t*>(mapped.data());
  const uint32_t crc = sk_crc32(0, start + kPage, header.directory_bytes);
  if (crc != header.directory_crc) {
    return fail(SK_DAMAGED, "%s: the directory has the checksum %08x, not %08x", path, crc,
                header.directory_crc);
  }
  const uint64_t names_begin = kPage + header.num_tables * sizeof(TableRecord);
  std::unordered_set<std::string> names;
  file->tables.resize(header.num_tables);
  for (uint32_t t = 0; t < header.num_tables; ++t) {
    FileTable& table = file->tables[t];
    std::memcpy(&table.record, start + kPage + t * sizeof(TableRecord), sizeof(TableRecord));
    const TableRecord& record = table.record;
    if (record.name_bytes > kMostNameBytes ||
        !fits(record.name_offset, record.name_bytes, 1, names_begin, bytes) ||
        !is_name(start + record.name_offset, record.name_bytes)) {
      return fail(SK_DAMAGED, "%s: table %u has no valid name: %u bytes at %llu", path, t,
                  record.name_bytes, static_cast<unsigned long long>(record.name_offset));
    }
    const auto* text = reinterpret_cast<const char*>(start + record.name_offset);
    table.name.assign(text, record.name_bytes);
    if (!names.insert(table.name).second) {
      return fail(SK_DAMAGED, "%s: two tables are named \"%s\"", path, table.name.c_str());
    }
    if (int status = check_record(path, record, table.name.c_str(), header)) return status;
  }
  return SK_OK;
}

// Checks that no two sections share bytes.
int check_overlaps(const SnapshotFile& file) {
  struct Section {
    uint64_t begin, end;
    const char* table;
  };
  std::vector<Section> sections;
  for (const FileTable& table : file.tables) {
    const TableRecord& of = table.record;
    sections.push_back(
        {of.index_offset, of.index_offset + of.num_buckets * sizeof(Bucket), table.name.c_str()});
    if (of.num_rows > 0) {
      sections.push_back(
          {of.rows_offset, of.rows_offset + of.num_rows * of.row_bytes, table.name.c_str()});
    }
  }
  std::sort(sections.begin(), sections.end(),
            [](const Section& a, const Section& b) { return a.begin < b.begin; });
  for (size_t i = 1; i < sections.size(); ++i) {
    if (sections[i].begin < sections[i - 1].end) {
      return fail(SK_DAMAGED, "%s: sections of the tables \"%s\" and \"%s\" overlap",
                  file.path.c_str(), sections[i - 1].table, sections[i].table);
    }
  }
  return SK_OK;
}

// Returns how many rows from deltas to reserve addresses for. Addresses are plentiful, but 1000
// tables have to share 2^47 of them.
int64_t most_spare_rows(const TableRecord& record) {
  const int64_t rows = static_cast<int64_t>(record.num_rows);
  const int64_t wanted = std::max<int64_t>(2 * rows, int64_t{16} << 20);
  const int64_t by_bytes = (int64_t{64} << 30) / record.row_bytes + rows;
  return std::min({wanted, by_bytes, kMostRows - rows});
}

int map_rows(const SnapshotFile& file, FileTable* table) {
  const TableRecord& record = table->record;
  const uint64_t bytes = record.num_rows * record.row_bytes;
  const uint64_t file_part = round_up(bytes, part_alignment(file.options));
  int64_t spare = most_spare_rows(record);
  // If addresses are limited (ulimit -v), make do with fewer rows from deltas.
  for (;; spare /= 2) {
    const uint64_t spare_bytes = round_up((spare + 1) * record.row_bytes, kPage);
    table->rows = reserve(file.options, record.rows_offset, file_part, spare > 0 ? spare_bytes : 0);
    if (table->rows || spare == 0) break;
  }
  if (!table->rows && file_part > 0) {
    return fail_of_system(file.path.c_str(), "reserve addresses for its rows");
  }
  const uint64_t first = (file_part + record.row_bytes - 1) / record.row_bytes;
  table->spare_begin = static_cast<int64_t>(std::min<uint64_t>(first, kMostRows));
  table->spare_end = std::min<int64_t>(table->rows.bytes() / record.row_bytes, kMostRows);
  table->spare_end = std::max(table->spare_begin, table->spare_end);
  return load_part(file, record.rows_offset, bytes, table->rows.data());
}

int map_index(const SnapshotFile& file, FileTable* table) {
  const uint64_t bytes = table->record.num_buckets * sizeof(Bucket);
  table->index = reserve(file.options, table->record.index_offset,
                         round_up(bytes, part_alignment(file.options)), 0);
  if (!table->index) return fail_of_system(file.path.c_str(), "reserve addresses for its index");
  return load_part(file, table->record.index_offset, bytes, table->index.data());
}

}  // namespace

int private_index(const SnapshotFile& file, size_t table, Memory* index) {
  const FileTable& of = file.tables[table];
  const uint64_t bytes = of.record.num_buckets * sizeof(Bucket);
  if (file.options.copy) {
    *index = Memory::zeros(bytes);
    if (!*index) return fail(SK_NO_MEMORY, "%s: no memory for another index", file.path.c_str());
    std::memcpy(index->data(), of.index.data(), bytes);
    return SK_OK;
  }
  *index = Memory(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, file.file.descriptor(),
                       static_cast<off_t>(of.record.index_offset)),
                  bytes);
  if (!*index) return fail_of_system(file.path.c_str(), "map its index");
  // Populate the pages by reading: unlike mlock(), this does not copy them. Older kernels support
  // neither call below; lookups are then merely slower.
#ifdef MADV_POPULATE_READ
  if (file.options.prefault || file.options.lock) madvise(index->data(), bytes, MADV_POPULATE_READ);
#endif
#ifdef MLOCK_ONFAULT
  if (file.options.lock) mlock2(index->data(), bytes, MLOCK_ONFAULT);
#endif
  return SK_OK;
}

namespace {

TableView view_of(const FileTable& table) {
  const TableRecord& record = table.record;
  TableView view{};
  view.buckets = static_cast<const Bucket*>(table.index.data());
  view.num_buckets = static_cast<int64_t>(record.num_buckets);
  view.index_seed = record.index_seed;
  view.rows = static_cast<const uint8_t*>(table.rows.data());
  view.row_limit = static_cast<int64_t>(record.num_rows);
  view.num_keys = static_cast<int64_t>(record.num_rows);
  view.dim = record.dim;
  view.row_bytes = record.row_bytes;
  view.row_format = static_cast<int32_t>(record.row_format);
  view.miss = static_cast<int32_t>(record.miss);
  view.initializer = Initializer{
      record.initial_seed, static_cast<Distribution>(record.distribution), record.a, record.b};
  view.num_fallbacks = static_cast<int64_t>(record.num_fallbacks);
  view.combiner = static_cast<int32_t>(record.combiner);
  view.has_padding_key = record.has_padding_key != 0;
  view.padding_key = record.padding_key;
  view.name = table.name.c_str();
  return view;
}

}  // namespace

Version version_of(const SnapshotFile& file) {
  Version version;
  for (const FileTable& table : file.tables) version.tables.push_back(view_of(table));
  version.version = file.header.version;
  version.dense_version = file.header.dense_version;
  version.step = file.header.step;
  version.written_at = file.header.written_at;
  return version;
}

int open_file(const std::string& path, const sk_open_options& options,
              std::unique_ptr<SnapshotFile>* opened) {
  const char* name = path.c_str();
  auto file = std::make_unique<SnapshotFile>();
  file->path = path;
  file->options = options;
  // O_NONBLOCK avoids waiting for a writer if the path is a pipe.
  file->file = OpenFile(open(name, O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status;
  const int descriptor = file->file.descriptor();
  if (descriptor < 0 || fstat(descriptor, &status) != 0) return fail_of_system(name, "open it");
  if (!S_ISREG(status.st_mode)) return fail(SK_IO_ERROR, "%s: not a regular file", name);
  const auto bytes = static_cast<uint64_t>(status.st_size);
  if (bytes < sizeof(SnapshotHeader)) {
    return fail(SK_DAMAGED, "%s: %llu bytes, but a snapshot has at least %zu", name,
                static_cast<unsigned long long>(bytes), sizeof(SnapshotHeader));
  }
  if (int failed = read_part(*file, 0, sizeof(SnapshotHeader), &file->header)) return failed;
  if (int failed = check_header(name, file->header, bytes)) return failed;
  if (int failed = read_directory(file.get())) return failed;
  if (int failed = check_overlaps(*file)) return failed;
  for (FileTable& table : file->tables) {
    if (int failed = map_index(*file, &table)) return failed;
  }
  for (FileTable& table : file->tables) {
    if (int failed = map_rows(*file, &table)) return failed;
  }
  if (options.verify) {
    if (int failed = verify(*file)) return failed;
  }
  *opened = std::move(file);
  return SK_OK;
}

}  // namespace sparsekit::serving
