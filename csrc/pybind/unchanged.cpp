// Checks whether the objects that belong to many tables are unchanged since an earlier step. A
// Python loop over hundreds of tables would take longer than the ops.
#include <array>
#include <cstdint>
#include <vector>

#include "bindings.h"

namespace py = pybind11;

namespace sparsekit {
namespace {

// DLPack's structs for accessing a tensor owned by Python, limited to what is used here:
// https://dmlc.github.io/dlpack/latest/c_api.html
struct DLTensor {
  void* data;
  int32_t device_type, device;
  int32_t ndim;
  uint8_t dtype_code, dtype_bits;
  uint16_t dtype_lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
struct DLPackExchangeAPI {
  uint32_t major, minor;
  DLPackExchangeAPI* older;
  void* not_used[3];
  int (*borrow)(void* object, DLTensor* tensor);  // sets a Python error unless it returns 0
};

Py_ssize_t size_of(const py::list& list) {
  return PyList_GET_SIZE(list.ptr());
}
// Returns a borrowed reference. A caller that then runs Python code must keep the object alive.
PyObject* item(const py::list& list, Py_ssize_t i) {
  return PyList_GET_ITEM(list.ptr(), i);
}
py::object owned_item(const py::list& list, Py_ssize_t i) {
  return py::reinterpret_borrow<py::object>(item(list, i));
}
// Returns a borrowed reference, or null if the dict lacks the key.
PyObject* find(PyObject* dict, PyObject* key) {
  PyObject* value = PyDict_GetItemWithError(dict, key);
  if (value == nullptr && PyErr_Occurred()) throw py::error_already_set();
  return value;
}
// Returns the attribute with this name, or null if there is none.
py::object attribute(const py::object& object, const py::str& name) {
  PyObject* value = PyObject_GetAttr(object.ptr(), name.ptr());
  if (value == nullptr) PyErr_Clear();
  return py::reinterpret_steal<py::object>(value);
}

bool dict_has(const py::dict& dict, const py::list& keys, const py::list& values) {
  if (size_of(keys) != size_of(values)) return false;
  for (Py_ssize_t i = 0; i < size_of(keys); ++i) {
    if (find(dict.ptr(), item(keys, i)) != item(values, i)) return false;
  }
  return true;
}

bool dict_is(const py::dict& dict, const py::list& keys, const py::list& values) {
  if (PyDict_GET_SIZE(dict.ptr()) != size_of(keys) || size_of(keys) != size_of(values)) {
    return false;
  }
  Py_ssize_t place = 0;
  PyObject *key, *value;
  for (Py_ssize_t i = 0; PyDict_Next(dict.ptr(), &place, &key, &value); ++i) {
    if (key != item(keys, i) || value != item(values, i)) return false;
  }
  return true;
}

// Looks up all keys in one dict, then in the next, since reaching a dict takes longer than
// looking up a key in it.
bool each_dict_has(const py::list& dicts, const py::list& keys, const py::list& values) {
  const Py_ssize_t count = size_of(keys);
  if (size_of(dicts) * count != size_of(values)) return false;
  for (Py_ssize_t i = 0; i < size_of(dicts); ++i) {
    for (Py_ssize_t k = 0; k < count; ++k) {
      if (find(item(dicts, i), item(keys, k)) != item(values, i * count + k)) return false;
    }
  }
  return true;
}

bool no_dict_has(const py::list& dicts, const py::str& key) {
  for (Py_ssize_t i = 0; i < size_of(dicts); ++i) {
    if (find(item(dicts, i), key.ptr()) != nullptr) return false;
  }
  return true;
}

bool lists_are(const py::list& items, const py::list& others) {
  if (size_of(items) != size_of(others)) return false;
  for (Py_ssize_t i = 0; i < size_of(items); ++i) {
    if (item(items, i) != item(others, i)) return false;
  }
  return true;
}

bool each_is(const py::list& objects, const py::str& name, const py::object& value) {
  for (Py_ssize_t i = 0; i < size_of(objects); ++i) {
    if (attribute(owned_item(objects, i), name).ptr() != value.ptr()) return false;
  }
  return true;
}

bool each_equal(const py::list& objects, const py::str& name, const py::str& other) {
  for (Py_ssize_t i = 0; i < size_of(objects); ++i) {
    const py::object object = owned_item(objects, i);
    const py::object one = attribute(object, name), two = attribute(object, other);
    if (!one || !two || !PyLong_CheckExact(one.ptr()) || !PyLong_CheckExact(two.ptr()))
      return false;
    if (!one.equal(two)) return false;
  }
  return true;
}

void count_up(const py::list& objects, const py::str& name) {
  const py::int_ unit(1);
  for (Py_ssize_t i = 0; i < size_of(objects); ++i) {
    const py::object object = owned_item(objects, i), count = attribute(object, name);
    if (!count || !PyLong_CheckExact(count.ptr())) continue;
    const auto next = py::reinterpret_steal<py::object>(PyNumber_Add(count.ptr(), unit.ptr()));
    if (!next || PyObject_SetAttr(object.ptr(), name.ptr(), next.ptr()) != 0) {
      throw py::error_already_set();
    }
  }
}

// Records the addresses and layouts of tensors, to check later that they are unchanged.
class TensorPlaces {
 public:
  explicit TensorPlaces(const py::list& tensors) {
    for (Py_ssize_t i = 0; i < size_of(tensors); ++i) {
      Place place;
      if (!read(owned_item(tensors, i), place)) throw py::error_already_set();
      places_.push_back(place);
    }
  }

  bool are_of(const py::list& tensors) const {
    if (size_of(tensors) != static_cast<Py_ssize_t>(places_.size())) return false;
    for (Py_ssize_t i = 0; i < size_of(tensors); ++i) {
      Place place;
      if (!read(owned_item(tensors, i), place)) {
        PyErr_Clear();
        return false;
      }
      if (place != places_[i]) return false;
    }
    return true;
  }

 private:
  static constexpr int32_t kDims = 2;
  // Address, offset, device, dtype, number of dimensions, sizes and strides.
  using Place = std::array<uint64_t, 5 + 2 * kDims>;

  // Returns false, and sets a Python error, if torch cannot describe the tensor.
  static bool read(const py::object& tensor, Place& place) {
    DLTensor of;
    if (api()->borrow(tensor.ptr(), &of) != 0) return false;
    place = {
        reinterpret_cast<uintptr_t>(of.data), of.byte_offset,
        uint64_t{static_cast<uint32_t>(of.device_type)} << 32 | static_cast<uint32_t>(of.device),
        uint64_t{of.dtype_code} << 32 | uint64_t{of.dtype_bits} << 16 | of.dtype_lanes,
        static_cast<uint64_t>(of.ndim)};
    if (of.ndim > kDims) {
      PyErr_SetString(PyExc_ValueError, "a tensor has more than 2 dimensions");
      return false;
    }
    for (int32_t d = 0; d < of.ndim; ++d) {
      place[5 + d] = static_cast<uint64_t>(of.shape[d]);
      place[5 + kDims + d] = static_cast<uint64_t>(of.strides[d]);
    }
    return true;
  }

  static const DLPackExchangeAPI* api() {
    static const DLPackExchangeAPI* found = [] {
      const py::object type = py::module_::import("torch").attr("Tensor");
      const py::object capsule = type.attr("__dlpack_c_exchange_api__");
      auto* newest = static_cast<DLPackExchangeAPI*>(
          PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
      if (newest == nullptr) throw py::error_already_set();
      while (newest->major != 1 && newest->older != nullptr) newest = newest->older;
      if (newest->major != 1) throw std::runtime_error("torch has another version of DLPack");
      return newest;
    }();
    return found;
  }

  std::vector<Place> places_;
};

}  // namespace

void add_unchanged(py::module_& module) {
  module.def("dict_has", &dict_has, py::arg("dict"), py::arg("keys"), py::arg("values"),
             "Return whether a dict has these objects at these keys.");
  module.def("dict_is", &dict_is, py::arg("dict"), py::arg("keys"), py::arg("values"),
             "Return whether a dict has these keys and objects, in this order, and no others.");
  module.def(
      "each_dict_has", &each_dict_has, py::arg("dicts"), py::arg("keys"), py::arg("values"),
      "Return whether each dict has these objects at these keys; `values` has the objects of "
      "all keys of the first dict, then those of the second, and so on.");
  module.def("no_dict_has", &no_dict_has, py::arg("dicts"), py::arg("key"),
             "Return whether no dict has a key.");
  module.def("lists_are", &lists_are, py::arg("items"), py::arg("others"),
             "Return whether two lists have the same objects.");
  module.def("each_is", &each_is, py::arg("objects"), py::arg("name"), py::arg("value"),
             "Return whether an attribute of each object is this object.");
  module.def("each_equal", &each_equal, py::arg("objects"), py::arg("name"), py::arg("other"),
             "Return whether two attributes of each object are equal ints.");
  module.def("count_up", &count_up, py::arg("objects"), py::arg("name"),
             "Add 1 to an attribute of each object, except where it is no int.");
  py::class_<TensorPlaces>(module, "TensorPlaces", "Addresses and layouts of tensors.")
      .def(py::init<const py::list&>(), py::arg("tensors"))
      .def("are_of", &TensorPlaces::are_of, py::arg("tensors"),
           "Return whether these tensors have the same addresses and layouts.");
}

}  // namespace sparsekit
