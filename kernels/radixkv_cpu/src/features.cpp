// Reads the weights of single features from panels; those of an output head are the embeddings of tokens. Each word of a feature
// is in another cache line; a loop without dependencies has many of them under way at once.

#include "calls.h"
#include "panel.h"

RADIXKV_API void radixkv_features(const radixkv::Features* call, int32_t) {
    using namespace radixkv;
    constexpr int64_t kParallel = 1 << 12;
#pragma omp parallel for schedule(static) if (call->rows * call->words >= kParallel)
    for (int64_t row = 0; row < call->rows; row++) {
        const int64_t feature = call->features[row];
        const uint32_t* from = call->panels + feature / kPanel * call->words * kPanel + feature % kPanel;
        uint32_t* to = call->out + row * call->words;
        for (int64_t word = 0; word < call->words; word++) to[word] = from[word * kPanel];
    }
}
