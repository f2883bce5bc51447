#include "serving/delta_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cinttypes>
#include <cstddef>
#include <cstring>
#include <new>

#include "serving/include/sparsekit_serving.h"
#include "serving/message.h"

namespace sparsekit::serving {
namespace {

class File {
 public:
  // Without O_NONBLOCK, opening a pipe would wait for a writer.
  explicit File(const char* path) : fd_(::open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {}
  ~File() {
    if (fd_ >= 0) ::close(fd_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  int fd() const { return fd_; }

  // Reads n bytes from `offset`. Returns false at the end of the file (errno is then 0), or if the
  // system reports an error.
  bool read(void* to, uint64_t n, uint64_t offset) const {
    auto* at = static_cast<char*>(to);
    while (n > 0) {
      const ssize_t got = ::pread(fd_, at, n < (1u << 30) ? n : 1u << 30, offset);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) {
        if (got == 0) errno = 0;
        return false;
      }
      at += got;
      n -= got;
      offset += got;
    }
    return true;
  }

 private:
  int fd_;
};

uint64_t padded(uint64_t bytes) {
  return (bytes + 7) / 8 * 8;
}

// Returns the status for a read that has failed. A file that ends too soon has been truncated.
int read_failed(const char* path) {
  if (errno == 0) return fail(SK_DAMAGED, "%s: damaged: ends too soon", path);
  return fail(SK_IO_ERROR, "%s: cannot be read: %s", path, std::strerror(errno));
}

int check_header(const char* path, const DeltaHeader& header, uint64_t size, uint64_t log_id) {
  if (std::memcmp(header.magic, kDeltaMagic, sizeof kDeltaMagic) != 0) {
    return fail(SK_DAMAGED, "%s: not a delta of sparsekit, or damaged: it begins otherwise", path);
  }
  if (sk_crc32(0, &header, offsetof(DeltaHeader, crc)) != header.crc) {
    return fail(SK_DAMAGED, "%s: damaged: wrong checksum of the header", path);
  }
  if (header.format_version > kFormatVersion) {
    return fail(SK_NEWER_FORMAT, "%s: of format %u, and this library reads formats up to %u", path,
                header.format_version, kFormatVersion);
  }
  if (header.file_bytes != size || size < sizeof header) {
    return fail(SK_DAMAGED, "%s: damaged: has %" PRIu64 " bytes instead of %" PRIu64, path, size,
                header.file_bytes);
  }
  if (header.log_id != log_id) {
    return fail(SK_DAMAGED,
                "%s: belongs to log %016" PRIx64 ", but the snapshot to log %016" PRIx64, path,
                header.log_id, log_id);
  }
  if (header.num_ranks == 0 || header.rank >= header.num_ranks) {
    return fail(SK_DAMAGED, "%s: damaged: rank %u of %u", path, header.rank, header.num_ranks);
  }
  return SK_OK;
}

// Checks a section's header. *bytes becomes the size of the section's data, at most `room`.
int check_section(const char* path, uint32_t number, const DeltaSection& section, uint64_t room,
                  const std::vector<TableView>& tables, uint64_t* bytes) {
  if (sk_crc32(0, &section, offsetof(DeltaSection, header_crc)) != section.header_crc) {
    return fail(SK_DAMAGED, "%s: damaged: wrong checksum of the header of section %u", path,
                number);
  }
  if (section.table >= tables.size()) {
    return fail(SK_DAMAGED, "%s: section %u is of table %u, but the snapshot has %zu tables", path,
                number, section.table, tables.size());
  }
  const TableView& table = tables[section.table];
  const auto kind = static_cast<DeltaKind>(section.kind);
  if (kind != DeltaKind::kUpsert && kind != DeltaKind::kTombstone) {
    return fail(SK_DAMAGED, "%s: section %u is of an unknown kind, %u", path, number, section.kind);
  }
  if (section.row_format != static_cast<uint32_t>(table.row_format) ||
      section.row_bytes != static_cast<uint64_t>(table.row_bytes)) {
    return fail(SK_DAMAGED,
                "%s: section %u has rows of format %u and %u bytes, but the snapshot's table %s of "
                "format %d and %" PRId64 " bytes",
                path, number, section.row_format, section.row_bytes, table.name, table.row_format,
                table.row_bytes);
  }
  const uint64_t each = 8 + (kind == DeltaKind::kUpsert ? section.row_bytes : 0);
  if (section.num_keys > static_cast<uint64_t>(kMostRows) || section.num_keys > room / each ||
      padded(section.num_keys * each) > room) {
    return fail(SK_DAMAGED,
                "%s: damaged: section %u has %" PRIu64 " keys, but there are %" PRIu64
                " bytes left",
                path, number, section.num_keys, room);
  }
  *bytes = padded(section.num_keys * each);
  return SK_OK;
}

}  // namespace

int DeltaFile::read(const std::string& path, uint64_t log_id, const std::vector<TableView>& tables,
                    bool* missing) {
  *missing = false;
  const char* name = path.c_str();
  const File file(name);
  struct stat about;
  if (file.fd() < 0 || ::fstat(file.fd(), &about) != 0) {
    *missing = errno == ENOENT;
    return fail(SK_IO_ERROR, "%s: cannot be opened: %s", name, std::strerror(errno));
  }
  if (!S_ISREG(about.st_mode)) return fail(SK_DAMAGED, "%s: not a plain file", name);
  if (!file.read(&header, sizeof header, 0)) return read_failed(name);
  const auto size = static_cast<uint64_t>(about.st_size);
  if (const int status = check_header(name, header, size, log_id)) return status;

  // Check all sizes before allocating any memory.
  sections.clear();
  num_upserts = 0;
  uint64_t offset = sizeof header;
  for (uint32_t number = 0; number < header.num_sections; ++number) {
    DeltaSection section;
    uint64_t bytes;
    if (size - offset < sizeof section) {
      return fail(SK_DAMAGED, "%s: damaged: ends before section %u of %u", name, number,
                  header.num_sections);
    }
    if (!file.read(&section, sizeof section, offset)) return read_failed(name);
    offset += sizeof section;
    if (const int status = check_section(name, number, section, size - offset, tables, &bytes)) {
      return status;
    }
    offset += bytes;
  }
  if (offset != size) {
    return fail(SK_DAMAGED, "%s: damaged: %" PRIu64 " bytes behind the last section", name,
                size - offset);
  }

  const uint64_t body = size - sizeof header;
  data.reset(new (std::nothrow) uint64_t[body / 8]);
  if (!data) return fail(SK_NO_MEMORY, "%s: no memory for its %" PRIu64 " bytes", name, size);
  if (!file.read(data.get(), body, sizeof header)) return read_failed(name);
  const auto* at = reinterpret_cast<const uint8_t*>(data.get());
  const uint8_t* const end = at + body;
  for (uint32_t number = 0; number < header.num_sections; ++number) {
    DeltaSection section;
    uint64_t bytes;
    std::memcpy(&section, at, sizeof section);
    at += sizeof section;
    // Check again, since the file may have been written to in the meantime.
    if (const int status = check_section(name, number, section, end - at, tables, &bytes)) {
      return status;
    }
    if (sk_crc32(0, at, bytes) != section.data_crc) {
      return fail(SK_DAMAGED, "%s: damaged: wrong checksum of section %u, of table %s", name,
                  number, tables[section.table].name);
    }
    const bool tombstones = static_cast<DeltaKind>(section.kind) == DeltaKind::kTombstone;
    const auto num_keys = static_cast<int64_t>(section.num_keys);
    sections.push_back({static_cast<int32_t>(section.table), tombstones, num_keys,
                        reinterpret_cast<const int64_t*>(at),
                        tombstones ? nullptr : at + 8 * num_keys});
    if (!tombstones) num_upserts += num_keys;
    at += bytes;
    if (static_cast<size_t>(end - at) < sizeof section && number + 1 < header.num_sections) {
      return fail(SK_DAMAGED, "%s: damaged: it has changed while it was read", name);
    }
  }
  return SK_OK;
}

}  // namespace sparsekit::serving
