#include "sparsekit/delimited_text.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "bindings.h"
#include "hash_parts.h"

namespace py = pybind11;

namespace sparsekit {
namespace {

char one_character(const std::string& text, const char* what) {
  if (text.size() > 1) throw py::value_error(std::string(what) + " must be one byte, got " + text);
  return text.empty() ? '\0' : text[0];
}

FieldKind kind_of(const std::string& name) {
  if (name == "skip") return FieldKind::kSkip;
  if (name == "float") return FieldKind::kFloat;
  if (name == "hash") return FieldKind::kHash;
  if (name == "int") return FieldKind::kInteger;
  if (name == "hex") return FieldKind::kHex;
  throw py::value_error("no kind of field: " + name);
}

struct BoundField {
  static constexpr int64_t kLabel = -1;
  Field field;
  int64_t column = 0;  // index of the dense column, or kLabel; used only if kind is kFloat
};

struct BoundFormat {
  TextFormat format;
  std::vector<int64_t> columns;  // BoundField::column of each field
  int64_t dense = 0;
  bool label = false;
};

BoundFormat make_format(const std::string& delimiter, const std::string& quote,
                        int64_t max_line_bytes, const py::list& fields) {
  BoundFormat made;
  made.format.delimiter = one_character(delimiter, "delimiter");
  made.format.quote = one_character(quote, "quote");
  made.format.max_line_bytes = max_line_bytes;
  for (const py::handle each : fields) {
    const auto& bound = each.cast<const BoundField&>();
    made.format.fields.push_back(bound.field);
    made.columns.push_back(bound.column);
    if (bound.field.kind != FieldKind::kFloat) continue;
    if (bound.column == BoundField::kLabel) {
      made.label = true;
    } else {
      made.dense = std::max(made.dense, bound.column + 1);
    }
  }
  return made;
}

const char* checked_text(const py::buffer_info& text, int64_t position) {
  if (text.itemsize != 1 || text.ndim != 1 || position < 0 || position > text.size) {
    throw py::value_error("text must be bytes, and positions within them");
  }
  return static_cast<const char*>(text.ptr);
}

// The lines of a text. The text must not change during the lifetime of this object.
class TextLines {
 public:
  TextLines(const py::buffer& text, int64_t stop, const std::string& delimiter,
            const std::string& quote, bool skip_blank, bool complete)
      : text_(text.request()), data_(checked_text(text_, stop)) {
    const char separator = one_character(delimiter, "delimiter");
    const char mark = one_character(quote, "quote");
    const py::gil_scoped_release no_gil;
    found_ = find_lines(data_, text_.size, stop, separator, mark, skip_blank, complete);
  }

  size_t size() const { return found_.lines.size(); }
  int64_t end() const { return found_.end; }
  bool unclosed() const { return found_.unclosed; }

  // Returns the offset of line i in the text.
  int64_t begin_of(size_t i) const { return found_.lines.at(i).begin; }

  py::bytes line(size_t i) const {
    const Line line = found_.lines.at(i);
    return {data_ + line.begin, static_cast<size_t>(line.end - line.begin)};
  }

  py::tuple parse(const BoundFormat& bound, const py::buffer& order, int num_threads) const {
    const py::buffer_info rows = order.request();
    if (rows.ndim != 1 || rows.itemsize != 8 || rows.strides[0] != 8) {
      throw py::value_error("order must be int64 and contiguous");
    }
    const auto* numbers = static_cast<const int64_t*>(rows.ptr);
    for (py::ssize_t i = 0; i < rows.size; ++i) {
      if (numbers[i] < 0 || numbers[i] >= static_cast<int64_t>(found_.lines.size())) {
        throw py::index_error("order has a row that is no line");
      }
    }
    py::buffer label = numpy_empty(bound.label ? rows.size : 0, "float32");
    py::buffer dense = numpy_empty(py::make_tuple(rows.size, bound.dense), "float32");
    TextFormat format = bound.format;
    auto* const label_out = static_cast<float*>(label.request(true).ptr);
    auto* const dense_out = static_cast<float*>(dense.request(true).ptr);
    for (size_t i = 0; i < format.fields.size(); ++i) {
      const bool is_label = bound.columns[i] == BoundField::kLabel;
      format.fields[i].output = is_label ? label_out : dense_out + bound.columns[i];
      format.fields[i].stride = is_label ? 1 : bound.dense;
    }
    ParsedKeys keys;
    std::vector<MalformedRow> malformed;
    {
      const py::gil_scoped_release no_gil;
      const ParallelFor parallel_for(run_on_threads, num_threads);
      parse_lines(format, data_, found_.lines.data(), numbers, rows.size, keys, malformed,
                  parallel_for);
    }
    py::list faults;
    for (const MalformedRow& fault : malformed) {
      faults.append(py::make_tuple(fault.row, fault.field, malformed_reason(fault.why)));
    }
    // Return without filling the arrays: a malformed row may have more keys than were counted.
    if (!malformed.empty()) return py::make_tuple(faults);
    py::buffer values = numpy_empty(keys.offsets.back(), "int64");
    py::buffer offsets = numpy_empty(keys.offsets.size(), "int64");
    auto* out = static_cast<int64_t*>(values.request(true).ptr);
    for (const auto& part : keys.parts) {
      if (!part.empty()) std::memcpy(out, part.data(), part.size() * sizeof(int64_t));
      out += part.size();
    }
    std::memcpy(offsets.request(true).ptr, keys.offsets.data(),
                keys.offsets.size() * sizeof(int64_t));
    return py::make_tuple(faults, label, dense, values, offsets);
  }

 private:
  py::buffer_info text_;
  const char* data_;
  FoundLines found_;
};

py::tuple skip_line_of(const py::buffer& text, int64_t begin, const std::string& delimiter,
                       const std::string& quote, int place) {
  const py::buffer_info info = text.request();
  const char* const data = checked_text(info, begin);
  auto at = static_cast<Place>(place);
  const int64_t end = skip_line(data, begin, info.size, one_character(delimiter, "delimiter"),
                                one_character(quote, "quote"), at);
  return py::make_tuple(end, static_cast<int>(at));
}

}  // namespace

void add_delimited_text(py::module_& m) {
  py::class_<BoundField>(m, "TextField", "How to read one field of each line.")
      .def(py::init([](const std::string& kind, int64_t column, float missing, bool required,
                       const std::string& separator, const py::object& missing_key, uint64_t seed) {
             BoundField made;
             made.field.kind = kind_of(kind);
             made.column = column;
             made.field.missing = missing;
             made.field.required = required;
             made.field.separator = one_character(separator, "separator");
             made.field.has_missing_key = !missing_key.is_none();
             if (!missing_key.is_none()) made.field.missing_key = missing_key.cast<int64_t>();
             made.field.seed = seed;
             return made;
           }),
           py::arg("kind"), py::arg("column") = 0, py::arg("missing") = 0.0f,
           py::arg("required") = false, py::arg("separator") = "",
           py::arg("missing_key") = py::none(), py::arg("seed") = 0);
  py::class_<BoundFormat>(m, "TextFormat", "How to read lines.")
      .def(py::init(&make_format), py::arg("delimiter"), py::arg("quote"),
           py::arg("max_line_bytes"), py::arg("fields"));
  py::class_<TextLines>(m, "TextLines", "The lines of a text that begin in [0, stop).")
      .def(py::init<const py::buffer&, int64_t, const std::string&, const std::string&, bool,
                    bool>(),
           py::arg("text"), py::arg("stop"), py::arg("delimiter"), py::arg("quote"),
           py::arg("skip_blank"), py::arg("complete"))
      .def("__len__", &TextLines::size)
      .def_property_readonly("end", &TextLines::end,
                             "Position after the last line and its newline.")
      .def_property_readonly("unclosed", &TextLines::unclosed,
                             "True if the last line ends within a quoted field.")
      .def("begin_of", &TextLines::begin_of, "Return where a line begins.")
      .def("line", &TextLines::line, "Return the bytes of a line.")
      .def("parse", &TextLines::parse, py::arg("format"), py::arg("order"), py::arg("num_threads"),
           "Return faults (row, field, reason) and, if there are none, label [n] or [0], dense "
           "[n, d], values and offsets [fields * n + 1] of keys.");
  m.def("skip_line", &skip_line_of, py::arg("text"), py::arg("begin"), py::arg("delimiter"),
        py::arg("quote"), py::arg("place"),
        "Return the end of the line that `begin` is in, or -1, and the place at the end of the "
        "text. A place is 0 at the beginning of a line, and 1 within a quoted field.");
}

}  // namespace sparsekit
