// What has been summed for some rows of queries: of a segment, and of all segments so far. See cpu_attention.cpp.

#pragma once

#include <algorithm>
#include <type_traits>

#include "functions.h"
#include "queries.h"
#include "tiles.h"

namespace {

constexpr float LOG2_E = 1.44269504f, NOWHERE = -3e38f;

struct State {  // of some rows
    float *sums, *total, *top;  // [rows][width]; [rows][WIDTH], to be added up; [rows]
};

inline int rounded_up(int number, int unit) { return (number + unit - 1) / unit * unit; }

struct Shape {
    int group, words, width;  // words of a key; numbers of a value, with those that fill its last vector
    bool is_in_tiles;         // whether products are those of matrix units, which read whole tiles

    template <class T>
    static Shape of(const Attention& a) {
        const int words = (a.key_dim + PER_WORD<T> - 1) / PER_WORD<T>, group = a.heads / a.kv_heads;
#if HAS_TILES
        if (std::is_same_v<T, bfloat16> && may_use_tiles())
            return {group, rounded_up(words, TILE), rounded_up(a.value_dim, COLUMNS), true};
#endif
        return {group, words, rounded_up(a.value_dim, WIDTH * PER_WORD<T>), false};
    }
    int64_t state_size(int rows) const { return int64_t(rows) * (width + WIDTH) + (rows + WIDTH - 1) / WIDTH * WIDTH; }
    State state(float* room, int rows) const {
        return {room, room + int64_t(rows) * width, room + int64_t(rows) * (width + WIDTH)};
    }
};

void clear(const Shape& shape, State state, int rows) {
    std::fill(state.sums, state.sums + int64_t(rows) * shape.width, 0.0f);
    std::fill(state.total, state.total + rows * WIDTH, 0.0f);
    std::fill(state.top, state.top + rows, NOWHERE);
}

inline float power_of_two(float x) { return power_of_two(all_lanes(x))[0]; }

// The next segment enters what the ones before it have summed. A segment of which a row has seen nothing changes nothing.
__attribute__((noinline)) void merge(const Shape& shape, State into, State segment, int rows) {
    for (int m = 0; m < rows; m++) {
        if (segment.top[m] == NOWHERE) continue;
        float *sums = into.sums + int64_t(m) * shape.width, *total = into.total + m * WIDTH;
        const float *more = segment.sums + int64_t(m) * shape.width, *added = segment.total + m * WIDTH;
        if (into.top[m] == NOWHERE) {
            std::copy(more, more + shape.width, sums), std::copy(added, added + WIDTH, total);
            into.top[m] = segment.top[m];
            continue;
        }
        const float top = std::max(into.top[m], segment.top[m]);
        const Lanes old = all_lanes(power_of_two(into.top[m] - top)), now = all_lanes(power_of_two(segment.top[m] - top));
        for (int d = 0; d < shape.width; d += WIDTH)
            store_lanes(fused(load_lanes(sums + d), old, load_lanes(more + d) * now), sums + d);
        store_lanes(fused(load_lanes(total), old, load_lanes(added) * now), total);
        into.top[m] = top;
    }
}

template <class T>
void finish(const Attention& a, const Shape& shape, const Item& item, State state) {
    for (int m = 0; m < item.count * shape.group; m++) {
        const int head = item.kv_head * shape.group + m % shape.group;
        const float total = sum_of_lanes(state.total + m * WIDTH);
        float weight = total > 0 ? 1.0f / total : 0.0f;
        if (a.sinks) {  // one logit more, without a value
            const float sink = a.sinks[head] * LOG2_E, top = std::max(state.top[m], sink);
            const float shrink = power_of_two(state.top[m] - top);
            weight = shrink / fused(all_lanes(total), all_lanes(shrink), all_lanes(power_of_two(sink - top)))[0];
        }
        const float* sums = state.sums + int64_t(m) * shape.width;
        T* out = static_cast<T*>(a.out) + ((item.token + m / shape.group) * a.heads + head) * a.value_dim;
        for (int d = 0; d < a.value_dim; d += WIDTH * PER_WORD<T>) {
            Lanes numbers[PER_WORD<T>];
            for (int i = 0; i < PER_WORD<T>; i++) numbers[i] = load_lanes(sums + d + i * WIDTH) * all_lanes(weight);
            narrow(numbers, out + d, a.value_dim - d);
        }
    }
}

}  // namespace
