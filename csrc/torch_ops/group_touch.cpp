#include "sparsekit/group_touch.h"

#include "group_bags.h"

namespace sparsekit::ops {
namespace {

struct PolicyRow {
  static constexpr ScalarType kDtype = ScalarType::Long;
  int64_t policy, halve_every;
};
static_assert(sizeof(PolicyRow) == 2 * sizeof(int64_t));

// Checks the scores and clocks of all tables.
std::vector<TouchedTable> read_tables(Arguments& given, const Views& scores, const Views& clocks,
                                      const Tensor& policies) {
  const size_t count = scores.size();
  const Descriptor<PolicyRow> rows(given, "policies", policies);
  given.check_size("policies", policies, 0, static_cast<int64_t>(count));
  given.check_list("clocks", clocks.size(), count);
  std::vector<TouchedTable> tables;
  tables.reserve(count);
  for (size_t t = 0; t < count; ++t) {
    const auto& [policy, halve_every] = rows[t];
    given.check(policy >= 0 && policy <= static_cast<int64_t>(ScorePolicy::kLfu), "policies[", t,
                "] must begin with 0 (none), 1 (lru) or 2 (lfu), got ", policy);
    given.check(halve_every >= 0, "policies[", t, "] must end with halve_every >= 0, got ",
                halve_every);
    given.written({"scores", t}, scores[t], ScalarType::Long, 1);
    given.read_word({"clocks", t}, clocks[t]);
    TouchedTable table{};
    table.policy = static_cast<ScorePolicy>(policy);
    table.halve_every = halve_every;
    table.clock = int64_data(clocks[t]);
    table.scores = mutable_data<int64_t>(scores[t]);
    table.capacity = scores[t].numel();
    tables.push_back(table);
  }
  return tables;
}

void touch(const Tensors& scores_in, const Tensor& index, const Tensor& rows, const Tensor& counts,
           const Tensor& bags, const Tensor& features, const Tensor& policies,
           const Tensors& clocks_in, const std::optional<Tensor>& occurrences) {
  Arguments given("group_touch_", Arguments::kWrites);
  const Views scores(scores_in), clocks(clocks_in);
  given.expect(2 * scores.size() + 5);
  std::vector<TouchedTable> tables = read_tables(given, scores, clocks, policies);
  const std::optional<Tensor> of_rows = rows, of_counts = counts, no_key_starts;
  const GroupArguments arguments(
      given, {index, of_rows, of_counts, bags, features, {}, no_key_starts}, {}, tables.size());
  FoundRows found{data<int32_t>(arguments.index), arguments.rows_data(), nullptr};
  std::optional<Tensor> of_entries;
  if (occurrences.has_value()) {
    given.read("occurrences", *occurrences, ScalarType::Long, 1);
    given.check_size("occurrences", *occurrences, 0, arguments.entries);
    of_entries = packed(*occurrences);
    found.occurrences = int64_data(*of_entries);
  }
  given.check_apart({scores.id(), clocks.id()});
  if (tables.empty()) return;
  const DeviceContext context(index);
  const auto count = static_cast<int64_t>(tables.size());
  if constexpr (kOnDevice) {
  } else {
    for (size_t t = 0; t < tables.size(); ++t) {
      std::tie(tables[t].first_entry, tables[t].n) = arguments.entries_of(t);
      tables[t].num_distinct = arguments.count_of(t);
    }
    std::vector<int32_t> order(tables.size());
    const ParallelFor parallel_for = torch_parallel_for();
    const Workspace memory(
        cpu::group_touch_workspace_bytes(tables.data(), count, order.data(), parallel_for), index);
    cpu::group_touch(tables.data(), count, found, order.data(), memory.data(), parallel_for);
  }
}

}  // namespace
}  // namespace sparsekit::ops

SPARSEKIT_LIBRARY_IMPL(m) {
  m.impl("group_touch_", TORCH_BOX(&sparsekit::ops::touch));
}
