# Defines the target sparsekit::serving, whose files lie beside this one, wherever the package is.
get_filename_component(_sparsekit_package "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
if(NOT TARGET sparsekit::serving)
  add_library(sparsekit::serving SHARED IMPORTED)
  set_target_properties(
    sparsekit::serving
    PROPERTIES IMPORTED_LOCATION "${_sparsekit_package}/lib/libsparsekit_serving.so"
               INTERFACE_INCLUDE_DIRECTORIES "${_sparsekit_package}/include")
endif()
unset(_sparsekit_package)
