#pragma once

#include <pybind11/pybind11.h>

namespace sparsekit {

// Adds TextField, TextFormat, TextLines and skip_line.
void add_delimited_text(pybind11::module_& m);

}  // namespace sparsekit
