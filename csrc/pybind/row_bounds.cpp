// Upper bounds on the number of rows in use in each table on a device, computed without waiting for
// the device. For hundreds of tables, loops in Python would take as long as the rest of a lookup.
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "bindings.h"

namespace py = pybind11;

namespace sparsekit {
namespace {

constexpr int64_t kUnknownVersion = -1;  // for a tensor whose writes are not counted

struct RowBound {
  double most = std::numeric_limits<double>::infinity();
  int64_t entries = 0;
  py::object size = py::none();
  int64_t version = kUnknownVersion;
  bool lost = false;
  int64_t known_since = 0;  // `entries` when the bound was last unknown

  int64_t add(const py::object& of_size, int64_t count) {
    const int64_t now = lost ? kUnknownVersion : version_of(of_size);
    if (!size.is(of_size) || version != now) {
      size = of_size;
      version = now;
      most = std::numeric_limits<double>::infinity();
      known_since = entries;
    }
    count = std::max<int64_t>(count, 1);  // so that each lookup changes `entries`
    entries += count;
    most += static_cast<double>(count);
    return entries;
  }

  // Returns the bound if it still holds for this size tensor, otherwise infinity. Unlike add(),
  // counts no keys.
  double most_for(const py::object& of_size) const {
    const bool known = !lost && size.is(of_size) && version == version_of(of_size);
    return known ? most : std::numeric_limits<double>::infinity();
  }

  void learn(int64_t rows, int64_t at) {
    if (at > known_since && version != kUnknownVersion) {
      most = std::min(most, static_cast<double>(rows + entries - at));
    }
  }

 private:
  static int64_t version_of(const py::object& tensor) {
    static const py::handle name = py::str("_version").release();
    PyObject* version = PyObject_GetAttr(tensor.ptr(), name.ptr());
    if (version == nullptr) {  // an inference tensor has no version
      PyErr_Clear();
      return kUnknownVersion;
    }
    return py::reinterpret_steal<py::object>(version).cast<int64_t>();
  }
};

// Bounds for the tables that insert keys in a lookup.
class RowBounds {
 public:
  RowBounds(const py::list& bounds, std::vector<double> capacities, std::vector<size_t> numbers)
      : owned_(bounds), capacities_(std::move(capacities)), numbers_(std::move(numbers)) {
    for (const py::handle bound : bounds) bounds_.push_back(bound.cast<RowBound*>());
    if (bounds_.size() != capacities_.size() || bounds_.size() != numbers_.size()) {
      throw py::value_error("bounds, capacities and numbers must be equally many");
    }
  }

  std::vector<int64_t> add(const py::list& sizes, const std::vector<int64_t>& entries) const {
    if (sizes.size() != bounds_.size())
      throw py::value_error("there must be a size for each bound");
    std::vector<int64_t> counted(bounds_.size());
    for (size_t i = 0; i < bounds_.size(); ++i) {
      counted[i] = bounds_[i]->add(sizes[i], entries.at(numbers_[i]));
    }
    return counted;
  }

  bool fit() const {
    for (size_t i = 0; i < bounds_.size(); ++i) {
      if (!(bounds_[i]->most <= capacities_[i])) return false;
    }
    return true;
  }

  bool learn(const py::buffer& words, const std::vector<int64_t>& counted) const {
    const py::buffer_info info = words.request();
    const auto* status = static_cast<const int64_t*>(info.ptr);
    if (info.itemsize != sizeof(int64_t) || counted.size() != bounds_.size()) {
      throw py::value_error("words must be int64, and counted what add() has returned");
    }
    bool refused = false;
    for (size_t i = 0; i < bounds_.size(); ++i) {
      const size_t first = numbers_[i] * 3;
      if (first + 3 > static_cast<size_t>(info.size)) throw py::index_error("too few words");
      bounds_[i]->learn(status[first + 2], counted[i]);
      refused |= status[first + 1] != 0;
    }
    return refused;
  }

 private:
  py::tuple owned_;
  std::vector<RowBound*> bounds_;
  std::vector<double> capacities_;
  std::vector<size_t> numbers_;
};

std::vector<int64_t> entries_by_table(const py::list& limits, const std::vector<int64_t>& lengths,
                                      size_t num_tables) {
  std::vector<int64_t> entries(num_tables);
  for (const py::handle limit : limits) {
    const auto row = py::reinterpret_borrow<py::tuple>(limit);
    const auto table = row[0].cast<size_t>(), source = row[1].cast<size_t>();
    const int64_t most = row[2].cast<int64_t>();
    entries.at(table) += std::min(most, lengths.at(source));
  }
  return entries;
}

}  // namespace

void add_row_bounds(py::module_& module) {
  py::class_<RowBound>(module, "RowBound")
      .def(py::init<>())
      .def_readwrite("most", &RowBound::most)
      .def_readwrite("entries", &RowBound::entries)
      .def_readonly("_size", &RowBound::size)
      .def_readonly("_lost", &RowBound::lost)
      .def("add", &RowBound::add, py::arg("size"), py::arg("entries"))
      .def("most_for", &RowBound::most_for, py::arg("size"))
      .def("learn", &RowBound::learn, py::arg("rows"), py::arg("entries"))
      .def("lose", [](RowBound& bound) { bound.lost = true; })
      .def("__deepcopy__", [](const RowBound&, const py::dict&) { return RowBound(); })
      .def("__reduce__", [](const py::object& bound) {
        return py::make_tuple(py::type::of(bound), py::tuple());
      });
  py::class_<RowBounds>(module, "RowBounds")
      .def(py::init<const py::list&, std::vector<double>, std::vector<size_t>>(), py::arg("bounds"),
           py::arg("capacities"), py::arg("numbers"))
      .def("add", &RowBounds::add, py::arg("sizes"), py::arg("entries"))
      .def("fit", &RowBounds::fit)
      .def("learn", &RowBounds::learn, py::arg("words"), py::arg("counted"));
  module.def("entries_by_table", &entries_by_table, py::arg("limits"), py::arg("lengths"),
             py::arg("num_tables"));
}

}  // namespace sparsekit
