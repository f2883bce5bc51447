#include "serving/log_folder.h"

#include <dirent.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <memory>

#include "serving/include/sparsekit_serving.h"
#include "serving/message.h"

namespace sparsekit::serving {
namespace {

// Reads `digits` decimal digits. Returns false if any is not a digit or the number is too large.
bool parse(const char** at, int digits, uint64_t* number) {
  *number = 0;
  for (int i = 0; i < digits; ++i, ++*at) {
    if (**at < '0' || **at > '9') return false;
    const auto digit = static_cast<uint64_t>(**at - '0');
    if (__builtin_mul_overflow(*number, uint64_t{10}, number)) return false;
    if (__builtin_add_overflow(*number, digit, number)) return false;
  }
  return true;
}

bool skip(const char** at, const char* text) {
  const size_t length = std::strlen(text);
  if (std::strncmp(*at, text, length) != 0) return false;
  *at += length;
  return true;
}

bool is_base(const char* name, uint64_t* version) {
  return skip(&name, "base-") && parse(&name, 20, version) && std::strcmp(name, ".sks") == 0;
}

bool is_delta(const char* name, uint64_t* version, uint64_t* rank, uint64_t* num_ranks) {
  return skip(&name, "delta-") && parse(&name, 20, version) && skip(&name, "-") &&
         parse(&name, 5, rank) && skip(&name, "-of-") && parse(&name, 5, num_ranks) &&
         std::strcmp(name, ".skd") == 0 && *rank < *num_ranks;
}

}  // namespace

std::string base_name(uint64_t version) {
  char name[64];
  std::snprintf(name, sizeof name, "base-%020" PRIu64 ".sks", version);
  return name;
}

std::string delta_name(uint64_t version, uint32_t rank, uint32_t num_ranks) {
  char name[64];
  std::snprintf(name, sizeof name, "delta-%020" PRIu64 "-%05u-of-%05u.skd", version, rank,
                num_ranks);
  return name;
}

int LogFolder::read(const std::string& folder) {
  path = folder;
  has_base = false;
  newest_base = 0;
  deltas.clear();
  const std::unique_ptr<DIR, int (*)(DIR*)> open(::opendir(folder.c_str()), ::closedir);
  if (!open) {
    return fail(SK_IO_ERROR, "%s: cannot be listed: %s", folder.c_str(), std::strerror(errno));
  }
  for (;;) {
    errno = 0;
    const dirent* entry = ::readdir(open.get());
    if (entry == nullptr) {
      if (errno == 0) break;
      return fail(SK_IO_ERROR, "%s: cannot be listed: %s", folder.c_str(), std::strerror(errno));
    }
    uint64_t version, rank, num_ranks;
    if (is_base(entry->d_name, &version)) {
      has_base = true;
      newest_base = std::max(newest_base, version);
    } else if (is_delta(entry->d_name, &version, &rank, &num_ranks)) {
      const auto of = static_cast<uint32_t>(num_ranks);
      Parts& parts = deltas.try_emplace(version, Parts{of, {}}).first->second;
      if (parts.num_ranks != of) {
        return fail(SK_DAMAGED, "%s/%s: there are parts of this version from %u ranks, too",
                    folder.c_str(), entry->d_name, parts.num_ranks);
      }
      parts.ranks.push_back(static_cast<uint32_t>(rank));
    }
  }
  for (auto& [version, parts] : deltas) {
    std::sort(parts.ranks.begin(), parts.ranks.end());
    // Some file systems list a file twice while other files are being added.
    parts.ranks.erase(std::unique(parts.ranks.begin(), parts.ranks.end()), parts.ranks.end());
  }
  return SK_OK;
}

bool LogFolder::is_complete(uint64_t version) const {
  const auto found = deltas.find(version);
  return found != deltas.end() && found->second.complete();
}

bool LogFolder::has_complete_after(uint64_t version) const {
  for (auto later = deltas.upper_bound(version); later != deltas.end(); ++later) {
    if (later->second.complete()) return true;
  }
  return false;
}

std::string LogFolder::missing(uint64_t version) const {
  const auto found = deltas.find(version);
  // If this version has no file at all, the next version's files tell how many ranks there are.
  const auto like = found != deltas.end() ? found : deltas.upper_bound(version);
  if (like == deltas.end()) return delta_name(version, 0, 1);
  uint32_t rank = 0;
  if (found != deltas.end()) {
    for (const uint32_t there : found->second.ranks) rank += there == rank;
  }
  return delta_name(version, rank, like->second.num_ranks);
}

}  // namespace sparsekit::serving
