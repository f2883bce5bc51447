#include "serving/file_memory.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "serving/message.h"

namespace sparsekit::serving {
namespace {

constexpr uint64_t kHugePage = uint64_t{2} << 20;

// Reads all pages into memory.
int populate(const SnapshotFile& file, void* begin, uint64_t bytes) {
#ifdef MADV_HUGEPAGE
  // Some file systems then load the rest of the file into huge pages, which processes share.
  // Huge pages make lookups of random keys faster.
  madvise(begin, bytes, MADV_HUGEPAGE);
#endif
#ifdef MADV_POPULATE_READ
  if (madvise(begin, bytes, MADV_POPULATE_READ) == 0) return SK_OK;
  // Linux before 5.14 does not support this advice.
  if (errno != EINVAL) return fail_of_system(file.path.c_str(), "read it");
#endif
  madvise(begin, bytes, MADV_WILLNEED);
  uint8_t sum = 0;
  for (uint64_t at = 0; at < bytes; at += kPage) {
    sum ^= static_cast<const volatile uint8_t*>(begin)[at];
  }
  static_cast<void>(sum);
  static_cast<void>(file);
  return SK_OK;
}

}  // namespace

uint64_t part_alignment(const sk_open_options& options) {
  return options.copy ? kHugePage : kPage;
}

Memory reserve(const sk_open_options& options, uint64_t offset, uint64_t part, uint64_t spare) {
  const uint64_t bytes = part + spare;
  if (bytes == 0) return Memory();
  const uint64_t pages = (bytes + kPage - 1) / kPage * kPage;
  const auto take = [](uint64_t size) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    return mmap(nullptr, size, PROT_NONE, flags, -1, 0);
  };
  // A huge page begins at a multiple of its size, both in memory and in the file.
  const uint64_t rest = options.copy ? 0 : offset % kHugePage, more = kHugePage - kPage;
  void* found = take(pages + more);
  if (found == MAP_FAILED) return Memory(take(pages), pages);  // do without huge pages
  // Release the addresses before and after the aligned range.
  auto* begin = static_cast<uint8_t*>(found);
  const uint64_t before =
      (kHugePage + rest - reinterpret_cast<uintptr_t>(begin) % kHugePage) % kHugePage;
  if (before > 0) munmap(begin, before);
  if (more > before) munmap(begin + before + pages, more - before);
  return Memory(begin + before, pages);
}

int read_part(const SnapshotFile& file, uint64_t offset, uint64_t bytes, void* to) {
  auto* next = static_cast<uint8_t*>(to);
  while (bytes > 0) {
    const ssize_t got = pread(file.file.descriptor(), next, std::min<uint64_t>(bytes, 1 << 30),
                              static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return fail_of_system(file.path.c_str(), "read it");
    if (got == 0) return fail(SK_DAMAGED, "%s: has become shorter", file.path.c_str());
    next += got;
    offset += got;
    bytes -= got;
  }
  return SK_OK;
}

int load_part(const SnapshotFile& file, uint64_t offset, uint64_t bytes, void* to) {
  if (bytes == 0) return SK_OK;
  const char* path = file.path.c_str();
  if (file.options.copy) {
    const uint64_t all = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    if (mprotect(to, all, PROT_READ | PROT_WRITE) != 0) {
      return fail(SK_NO_MEMORY, "%s: no memory to copy %llu bytes of it", path,
                  static_cast<unsigned long long>(bytes));
    }
#ifdef MADV_HUGEPAGE
    madvise(to, all, MADV_HUGEPAGE);  // only a wish: the system may have no huge pages
#endif
    if (int status = read_part(file, offset, bytes, to)) return status;
    if (mprotect(to, all, PROT_READ) != 0) return fail_of_system(path, "protect its copy");
  } else {
    const void* mapped = mmap(to, bytes, PROT_READ, MAP_PRIVATE | MAP_FIXED, file.file.descriptor(),
                              static_cast<off_t>(offset));
    if (mapped == MAP_FAILED) return fail_of_system(path, "map it");
    if (file.options.prefault) {
      if (int status = populate(file, to, bytes)) return status;
    }
  }
  if (file.options.lock && mlock(to, bytes) != 0) {
    return fail_of_system(path, "lock it in memory (ulimit -l is the limit)");
  }
  return SK_OK;
}

}  // namespace sparsekit::serving
