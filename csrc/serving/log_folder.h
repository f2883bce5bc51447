// Lists the folder of a delta log.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace sparsekit::serving {

std::string base_name(uint64_t version);
std::string delta_name(uint64_t version, uint32_t rank, uint32_t num_ranks);

struct LogFolder {
  // The parts of a version that exist.
  struct Parts {
    uint32_t num_ranks;
    std::vector<uint32_t> ranks;  // ascending

    bool complete() const { return ranks.size() == num_ranks; }
  };

  std::string path;
  bool has_base = false;
  uint64_t newest_base = 0;
  std::map<uint64_t, Parts> deltas;

  // Reads the folder; returns an sk_status. Files added or removed during the call may or may not
  // be listed.
  int read(const std::string& folder);

  bool is_complete(uint64_t version) const;

  // Returns true if a later version is complete; this version should then be complete, too.
  bool has_complete_after(uint64_t version) const;

  // Returns the name of a file that is missing from this version.
  std::string missing(uint64_t version) const;

  std::string in_folder(const std::string& name) const { return path + "/" + name; }
};

}  // namespace sparsekit::serving
