// Products with sections of a weight, in one call for all of them.
#pragma once

#include "calls.h"

namespace radixkv {

// Rows [starts[i], starts[i + 1]) pass the features [i * outputs, (i + 1) * outputs) of a weight that holds so many sections one
// behind the other. `linear` is that of one section, and of all rows; where there are several, outputs fill their panels.
void multiply_sections(const Linear& linear, int64_t num_sections, const int64_t* starts, int32_t is_bf16);

}  // namespace radixkv
