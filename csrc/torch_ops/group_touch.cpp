#include "sparsekit/group_touch.h"

#include "group_bags.h"

namespace sparsekit::ops {
namespace {

struct PolicyRow {
  static constexpr ScalarType kDtype = ScalarType::Long;
  int64_t policy, halve_every;
};
static_assert(sizeof(PolicyRow) == 2 * sizeof(int64_t));

// Checks the scores and clocks of all tables, and returns the tables that score rows. Their bags
// are not yet known, and are left out.
std::vector<TouchedTable> read_tables(Arguments& given, const Views& scores, const Views& clocks,
                                      const Tensor& policies, const std::vector<int64_t>& ticks) {
  const size_t count = scores.size();
  const Descriptor<PolicyRow> rows(given, "policies", policies);
  given.check_size("policies", policies, 0, static_cast<int64_t>(count));
  given.check_list("clocks", clocks.size(), count);
  if (!ticks.empty()) given.check_list("ticks", ticks.size(), count);
  std::vector<TouchedTable> tables;
  tables.reserve(count);
  for (size_t t = 0; t < count; ++t) {
    const auto& [policy, halve_every] = rows[t];
    given.check(policy >= 0 && policy <= static_cast<int64_t>(ScorePolicy::kLfu), "policies[", t,
                "] must begin with 0 (none), 1 (lru) or 2 (lfu), got ", policy);
    given.check(halve_every >= 0, "policies[", t, "] must end with halve_every >= 0, got ",
                halve_every);
    given.written({"scores", t}, scores[t], ScalarType::Long, 1);
    given.written({"clocks", t}, clocks[t], ScalarType::Long, 1);
    const int64_t advance = ticks.empty() ? 0 : ticks[t];
    given.check(advance >= 0, "ticks[", t, "] must be at least 0, got ", advance);
    const bool scored = policy != static_cast<int64_t>(ScorePolicy::kNone) && scores[t].numel() > 0;
    if (scored || clocks[t].numel() != 0) given.check_one({"clocks", t}, clocks[t]);
    if (!scored) continue;
    tables.push_back({static_cast<ScorePolicy>(policy), halve_every,
                      mutable_data<int64_t>(clocks[t]), advance, mutable_data<int64_t>(scores[t]),
                      scores[t].numel(), static_cast<int64_t>(t), 0, 0});
  }
  return tables;
}

void set_bags(const GroupFeatures& group, std::vector<TouchedTable>& tables) {
  int64_t table = 0, bag = 0;
  for (TouchedTable& touched : tables) {
    const auto pass = [&](int64_t end) {
      for (; table < end; ++table) {
        for (int64_t f = group.table_features[table]; f < group.table_features[table + 1]; ++f) {
          bag += group.features[f].bags;
        }
      }
    };
    pass(touched.table);
    touched.first_bag = bag;
    pass(touched.table + 1);
    touched.bags = bag - touched.first_bag;
  }
}

void touch(const Tensors& scores_in, const Tensor& index, const Tensor& rows, const Tensor& counts,
           const Tensor& bags, const Tensor& features, const Tensor& policies,
           const Tensors& clocks_in, const std::optional<Tensor>& occurrences,
           const std::vector<int64_t>& ticks) {
  Arguments given("group_touch_", Arguments::kWrites);
  const Views scores(scores_in), clocks(clocks_in);
  given.expect(2 * scores.size() + 5);
  std::vector<TouchedTable> tables = read_tables(given, scores, clocks, policies, ticks);
  const std::optional<Tensor> of_rows = rows, of_counts = counts, no_key_starts;
  const GroupArguments arguments(
      given, {index, of_rows, of_counts, bags, features, {}, no_key_starts}, {}, scores.size());
  std::optional<Tensor> of_entries;
  if (occurrences.has_value()) {
    given.read("occurrences", *occurrences, ScalarType::Long, 1);
    given.check_size("occurrences", *occurrences, 0, arguments.entries);
    of_entries = packed(*occurrences);
  }
  given.check_apart({scores.id(), clocks.id()});
  if (tables.empty()) return;
  set_bags(arguments.group, tables);
  const FoundRows found{arguments.entries,
                        data<int32_t>(arguments.index),
                        arguments.rows_data(),
                        int64_data(*arguments.counts),
                        data<int32_t>(arguments.bags),
                        of_entries ? int64_data(*of_entries) : nullptr};
  const DeviceContext context(index);
  const auto count = static_cast<int64_t>(tables.size());
  if constexpr (kOnDevice) {
    const auto* on_device = static_cast<const TouchedTable*>(
        context.cached_copy(tables.data(), count * static_cast<int64_t>(sizeof(TouchedTable))));
    cuda::group_touch(tables.data(), on_device, count, found, context.stream());
  } else {
    std::vector<int32_t> order(tables.size());
    const ParallelFor parallel_for = torch_parallel_for();
    const Workspace memory(
        cpu::group_touch_workspace_bytes(tables.data(), count, found, order.data(), parallel_for),
        index);
    cpu::group_touch(tables.data(), count, found, order.data(), memory.data(), parallel_for);
  }
}

}  // namespace
}  // namespace sparsekit::ops

SPARSEKIT_LIBRARY_IMPL(m) {
  m.impl("group_touch_", TORCH_BOX(&sparsekit::ops::touch));
}
