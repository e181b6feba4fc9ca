// Recurrences over states in pages, on a CPU, each state in place. Plain C ABI; see state/cpu.py.
//
// A state is cut into parts that no other part depends on: some values of one head, or some channels. A part passes
// through all tokens of a piece while it lies in the first cache, one token after the other, by the same instructions
// however many tokens there are. So the bits that come out depend on a row's tokens alone: not on how they were cut
// into pieces, not on the rows beside, not on the number of threads. Lanes are values or channels, and sums over keys
// or states go one by one in their order. Arithmetic is in float32, as in state/reference.py; a state whose page has
// fewer bits is rounded after each token.
//
// A piece is [start, start + length) of the packed tokens, from page `page`, or from zeros; its last state also goes to
// `saved_to`, unless that is negative.

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include <type_traits>
#include <vector>

#include "elementwise.h"

extern "C" {

struct Pieces {
    const int64_t *start, *length, *page, *is_new, *saved_to;  // [count]
    int64_t count;
};

struct Heads {
    Pieces pieces;
    const float *q, *k, *v, *g, *beta;  // [T, KH, K], as much, [T, H, V], [T, H (, K if keyed)], [T, H] or null: no delta
    float* out;                         // [T, H, V] dense
    void* pages;                        // [pages, H, K, V] dense within a page
    int64_t q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head, beta_token, beta_head, page_stride;
    int32_t heads, key_heads, keys, values, keyed, kind;  // H / KH neighbours share a key head
};

struct Scan {
    Pieces pieces;
    const float *A, *x, *dt, *B, *C;  // [C, S], [T, C], [T, C], [T, S], [T, S]
    float* out;                       // [T, C] dense
    void* pages;                      // [pages, C, S] dense within a page
    int64_t x_token, dt_token, B_token, C_token, page_stride;
    int32_t channels, states, kind;
};

struct Sum {
    Pieces pieces;
    const float *x, *g;  // [T, C], [T, C]
    float* out;          // [T, C] dense
    void* pages;         // [pages, C] dense within a page
    int64_t x_token, g_token, page_stride;
    int32_t channels, kind;
};

struct Convolution {
    Pieces pieces;
    const void *weight, *bias, *x, *before, *after;  // [C, window + 1], [C], [T, C], [T, C] or null, [T, C] or null
    void *out, *pages;                               // [T, C] dense, [pages, C, window] dense within a page
    int64_t x_token, before_token, after_token, page_stride;
    int32_t channels, window, activates, kind;
};

}  // extern "C"

namespace {

constexpr int PART = 2;                     // vectors of values, or of channels, that pass through all tokens together
constexpr int64_t WORTH_THREADS = 1 << 15;  // numbers of states; below, waking threads takes longer than the work

int64_t tokens_of(const Pieces& pieces) {
    int64_t tokens = 0;
    for (int64_t n = 0; n < pieces.count; n++) tokens += pieces.length[n];
    return tokens;
}

// The pages of one piece, from the place of some part on.
template <class T>
struct Place {
    T *state, *saved;  // saved: or null
    bool is_new;

    Place(const Pieces& pieces, int64_t piece, void* pages, int64_t page_stride, int64_t offset) {
        T* first = static_cast<T*>(pages) + offset;
        const int64_t to = pieces.saved_to[piece];
        state = first + pieces.page[piece] * page_stride;
        saved = to < 0 ? nullptr : first + to * page_stride;
        is_new = pieces.is_new[piece];
    }
};

// -- heads -------------------------------------------------------------------------------------------------------------

// What a token does to the state. KEYED_DELTA: and each number of a key decays by itself.
enum Rule { LINEAR, DELTA, KEYED_DELTA };

// One head of a wave, and what its tokens bring.
struct Head {
    const Heads& a;
    int64_t head, key_head;

    Head(const Heads& a, int64_t head) : a(a), head(head), key_head(head * a.key_heads / a.heads) {}
    const float* q(int64_t t) const { return a.q + t * a.q_token + key_head * a.q_head; }
    const float* k(int64_t t) const { return a.k + t * a.k_token + key_head * a.k_head; }
    const float* v(int64_t t) const { return a.v + t * a.v_token + head * a.v_head; }
    float* out(int64_t t) const { return a.out + (t * a.heads + head) * a.values; }
    float beta(int64_t t) const { return a.beta[t * a.beta_token + head * a.beta_head]; }
    // Tokens lie apart, so that no processor guesses what is read next.
    void prefetch_token(int64_t t, int from) const {
        for (int i = 0; i < a.keys; i += 16) {
            prefetch(q(t) + i);
            prefetch(k(t) + i);
        }
        for (int i = 0; i < PART * WIDTH; i += 16) prefetch(v(t) + from + i);
    }
    const float* g(int64_t t) const { return a.g + t * a.g_token + head * a.g_head; }
};

// What is left of a state at a token: of all of it, or of each key's part; and what the token's key recalls by.
struct Left {
    float all;
    const float *each, *recalls;  // [keys]; each: or null
};

// That of tokens [start, end), for which it is asked in their order. An answer holds until the one after the next.
template <Rule R>
class Decays {
    const Head& h;
    const int64_t start, end;
    float of_all[WIDTH];
    std::vector<float> of_keys;

public:
    Decays(const Head& h, int64_t start, int64_t end)
        : h(h), start(start), end(end), of_keys(R == KEYED_DELTA ? 4 * h.a.keys : 0) {}

    Left at(int64_t t) {
        if constexpr (R == KEYED_DELTA) {
            float *each = of_keys.data() + (t - start) % 2 * 2 * h.a.keys, *recalls = each + h.a.keys;
            for (int i = 0; i < h.a.keys; i += WIDTH) {
                const int count = h.a.keys - i;
                const Lanes left = exponential(load_some(h.g(t) + i, count));
                store_some(left, each + i, count);
                store_some(left * load_some(h.k(t) + i, count), recalls + i, count);
            }
            return {1.0f, each, recalls};
        }
        const int64_t turn = (t - start) % WIDTH;
        if (turn == 0) {
            float g[WIDTH] = {};
            for (int64_t n = 0; n < std::min<int64_t>(WIDTH, end - t); n++) g[n] = *h.g(t + n);
            store_lanes(exponential(load_lanes(g)), of_all);
        }
        return {of_all[turn], nullptr, h.k(t)};
    }
};

// known[value] = sum over keys of k[key] * state[key][value], of B vectors of values.
template <int B, class T>
inline void recall(const T* state, int64_t row, int keys, const float* k, Lanes* known) {
    Lanes sums[B] = {};
    for (int i = 0; i < keys; i++) {
        const Lanes here = all_lanes(k[i]);
        for (int b = 0; b < B; b++) sums[b] = fused(here, load_lanes(state + i * row + b * WIDTH), sums[b]);
    }
    for (int b = 0; b < B; b++) known[b] = sums[b];
}

// One token: state = decay * state + k added;  result = q state.  AHEAD: and what the next token's key recalls of it.
// T: what the state is kept as between tokens.
template <int B, bool AHEAD, bool KEYED, class T, class Kept>
inline void pass(Kept* state, int64_t row, int keys, const Left& left, const float* q, const float* k,
                 const float* next, const Lanes* added, Lanes* result, Lanes* known) {
    const Lanes of_all = all_lanes(left.all);
    Lanes own[B], sums[B] = {}, recalled[B] = {};
    for (int b = 0; b < B; b++) own[b] = added[b];
    for (int i = 0; i < keys; i++) {
        const Lanes key = all_lanes(k[i]), query = all_lanes(q[i]), ahead = all_lanes(AHEAD ? next[i] : 0.0f);
        const Lanes decay = KEYED ? all_lanes(left.each[i]) : of_all;
        for (int b = 0; b < B; b++) {
            Kept* at = state + i * row + b * WIDTH;
            Lanes s = fused(key, own[b], decay * load_lanes(at));
            sums[b] = fused(query, s, sums[b]);
            if constexpr (!std::is_same_v<T, Kept>) s = rounded<T>(s);
            store_lanes(s, at);
            if (AHEAD) recalled[b] = fused(ahead, s, recalled[b]);
        }
    }
    for (int b = 0; b < B; b++) result[b] = sums[b];
    for (int b = 0; AHEAD && b < B; b++) known[b] = recalled[b];
}

// What a token adds to each value: v, or what of it is not known already.
template <Rule R>
inline Lanes correction(Lanes v, Lanes known, float decay, float beta) {
    return R != LINEAR ? all_lanes(beta) * fused(all_lanes(-decay), known, v) : v;
}

// A single token over values [from, from + B * WIDTH) of a state in its page.
template <int B, Rule R, class T>
inline void single(const Head& h, int64_t t, const Left& left, T* state, int from) {
    const float beta = R != LINEAR ? h.beta(t) : 0.0f;
    Lanes known[B] = {}, added[B], result[B];
    if (R != LINEAR) recall<B>(state + from, h.a.values, h.a.keys, left.recalls, known);
    for (int b = 0; b < B; b++)
        added[b] = correction<R>(load_lanes(h.v(t) + from + b * WIDTH), known[b], left.all, beta);
    pass<B, false, R == KEYED_DELTA, T>(state + from, h.a.values, h.a.keys, left, h.q(t), h.k(t), nullptr, added,
                                        result, nullptr);
    for (int b = 0; b < B; b++) store_lanes(result[b], h.out(t) + from + b * WIDTH);
}

// Tokens [start, end) over `count` values, at most B vectors, of a state that was copied to `held` [keys, B * WIDTH].
template <int B, Rule R, class T>
void many(const Head& h, int64_t start, int64_t end, float* held, int from, int count) {
    constexpr int ROW = B * WIDTH;
    constexpr bool KEYED = R == KEYED_DELTA;
    Lanes known[B] = {}, added[B], result[B];
    Decays<R> decays(h, start, end);
    Left left = decays.at(start);
    if (R != LINEAR) recall<B>(held, ROW, h.a.keys, left.recalls, known);
    for (int64_t t = start; t < end; t++) {
        if (t + 2 < end) h.prefetch_token(t + 2, from);
        const Left next = t + 1 < end ? decays.at(t + 1) : left;
        const float beta = R != LINEAR ? h.beta(t) : 0.0f;
        for (int b = 0; b < B; b++)
            added[b] = correction<R>(load_some(h.v(t) + from + b * WIDTH, count - b * WIDTH), known[b], left.all, beta);
        if (R != LINEAR && t + 1 < end)
            pass<B, true, KEYED, T>(held, ROW, h.a.keys, left, h.q(t), h.k(t), next.recalls, added, result, known);
        else
            pass<B, false, KEYED, T>(held, ROW, h.a.keys, left, h.q(t), h.k(t), nullptr, added, result, nullptr);
        left = next;
        for (int b = 0; b < B; b++) store_some(result[b], h.out(t) + from + b * WIDTH, count - b * WIDTH);
    }
}

// Values [from, from + count), at most B vectors, of all tokens of a piece.
template <int B, Rule R, class T>
void part_of_head(const Head& h, int64_t piece, const Place<T>& place, int from, int count, std::vector<Lanes>& room) {
    const int keys = h.a.keys;
    const int64_t start = h.a.pieces.start[piece], row = h.a.values;
    room.resize(size_t(keys) * B);
    float* held = reinterpret_cast<float*>(room.data());
    for (int i = 0; i < keys; i++)
        for (int b = 0; b < B; b++)
            room[i * B + b] =
                place.is_new ? Lanes{} : load_some(place.state + i * row + from + b * WIDTH, count - b * WIDTH);
    many<B, R, T>(h, start, start + h.a.pieces.length[piece], held, from, count);
    for (T* to : {place.state, place.saved})
        for (int i = 0; to && i < keys; i++)
            for (int b = 0; b < B; b++)
                store_some(room[i * B + b], to + i * row + from + b * WIDTH, count - b * WIDTH);
}

// All values of a head for a single token: a state is read once and written once, in the order in which it lies.
template <Rule R, class T>
void single_head(const Head& h, int64_t piece, const Place<T>& place, std::vector<Lanes>& room) {
    const int64_t t = h.a.pieces.start[piece], size = int64_t(h.a.keys) * h.a.values;
    Decays<R> decays(h, t, t + 1);
    const Left left = decays.at(t);
    if (place.is_new) std::memset(static_cast<void*>(place.state), 0, sizeof(T) * size);
    int from = 0;
    if (REGISTERS == 32)
        for (; from + 8 * WIDTH <= h.a.values; from += 8 * WIDTH)
            single<8, R, T>(h, t, left, place.state, from);
    for (; from + 4 * WIDTH <= h.a.values; from += 4 * WIDTH) single<4, R, T>(h, t, left, place.state, from);
    for (; from + 2 * WIDTH <= h.a.values; from += 2 * WIDTH) single<2, R, T>(h, t, left, place.state, from);
    for (; from + WIDTH <= h.a.values; from += WIDTH) single<1, R, T>(h, t, left, place.state, from);
    if (from < h.a.values) part_of_head<1, R, T>(h, piece, place, from, h.a.values - from, room);
    if (place.saved) std::memcpy(static_cast<void*>(place.saved), place.state, sizeof(T) * size);
}

template <Rule R, class T>
void heads(const Heads& a) {
    struct Work {
        int64_t piece, head;
        int from;  // the first value of a part; WHOLE: all of a single token
    };
    constexpr int WHOLE = -1;
    const int64_t size = int64_t(a.keys) * a.values;
    std::vector<Work> works;
    for (int64_t piece = 0; piece < a.pieces.count; piece++)
        for (int64_t head = 0; head < a.heads; head++)
            if (a.pieces.length[piece] == 1)
                works.push_back({piece, head, WHOLE});
            else
                for (int from = 0; from < a.values; from += PART * WIDTH) works.push_back({piece, head, from});
#pragma omp parallel if (tokens_of(a.pieces) * a.heads * size > WORTH_THREADS)
    {
        std::vector<Lanes> room;
#pragma omp for schedule(dynamic)
        for (size_t n = 0; n < works.size(); n++) {
            const auto [piece, head, from] = works[n];
            const Head h(a, head);
            const Place<T> place(a.pieces, piece, a.pages, a.page_stride, head * size);
            const int count = std::min(PART * WIDTH, a.values - from);
            if (from == WHOLE)
                single_head<R, T>(h, piece, place, room);
            else if (count > WIDTH)
                part_of_head<PART, R, T>(h, piece, place, from, count, room);
            else
                part_of_head<1, R, T>(h, piece, place, from, count, room);
        }
    }
}

// -- channels ----------------------------------------------------------------------------------------------------------

#if defined(__SSE2__)
// Four rows of four numbers as four columns.
inline void turn_four(const float* from, int64_t from_row, float* to, int64_t to_row) {
    __m128 a = _mm_loadu_ps(from), b = _mm_loadu_ps(from + from_row);
    __m128 c = _mm_loadu_ps(from + 2 * from_row), d = _mm_loadu_ps(from + 3 * from_row);
    _MM_TRANSPOSE4_PS(a, b, c, d);
    _mm_storeu_ps(to, a);
    _mm_storeu_ps(to + to_row, b);
    _mm_storeu_ps(to + 2 * to_row, c);
    _mm_storeu_ps(to + 3 * to_row, d);
}
#else
inline void turn_four(const float* from, int64_t from_row, float* to, int64_t to_row) {
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) to[j * to_row + i] = from[i * from_row + j];
}
#endif

// to[column][row] = from[row][column], of numbers of any kind.
template <class From, class To>
inline void turn(const From* from, int64_t from_row, int rows, int columns, To* to, int64_t to_row) {
    if constexpr (std::is_same_v<From, float> && std::is_same_v<To, float>)
        if (rows % 4 == 0 && columns % 4 == 0) {
            for (int i = 0; i < rows; i += 4)
                for (int j = 0; j < columns; j += 4) turn_four(from + i * from_row + j, from_row, to + j * to_row + i, to_row);
            return;
        }
    for (int j = 0; j < columns; j++)
        for (int i = 0; i < rows; i++) from_float(to_float(from[i * from_row + j]), to + j * to_row + i);
}

// Tokens of a piece over `count` channels, at most WIDTH: held, A: [states, WIDTH].
template <class T>
void scan_channels(const Scan& a, int64_t start, int64_t end, int64_t first, int count, float* held, const float* A) {
    for (int64_t t = start; t < end; t++) {
        const float *B = a.B + t * a.B_token, *C = a.C + t * a.C_token;
        const Lanes dt = load_some(a.dt + t * a.dt_token + first, count);
        const Lanes added = dt * load_some(a.x + t * a.x_token + first, count), in_powers = dt * all_lanes(LOG2_E);
        Lanes sum = {};
        for (int i = 0; i < a.states; i++) {
            float* at = held + i * WIDTH;
            const Lanes decay = power_of_two(in_powers * load_lanes(A + i * WIDTH), Lanes{});
            const Lanes s = fused(added, all_lanes(B[i]), decay * load_lanes(at));
            sum = fused(s, all_lanes(C[i]), sum);
            store_lanes(rounded<T>(s), at);
        }
        store_some(sum, a.out + t * a.channels + first, count);
    }
}

template <class T>
void scan(const Scan& a) {
    constexpr int BLOCK = 4 * WIDTH;
    const int64_t blocks = (a.channels + BLOCK - 1) / BLOCK;
#pragma omp parallel if (tokens_of(a.pieces) * a.channels * a.states > WORTH_THREADS)
    {
        std::vector<Lanes> room(2 * a.states);
        float *held = reinterpret_cast<float*>(room.data()), *A = held + a.states * WIDTH;
#pragma omp for schedule(dynamic)
        for (int64_t work = 0; work < a.pieces.count * blocks; work++) {
            const int64_t piece = work / blocks, start = a.pieces.start[piece], end = start + a.pieces.length[piece];
            const int64_t block = work % blocks * BLOCK, last = std::min<int64_t>(block + BLOCK, a.channels);
            for (int64_t first = block; first < last; first += WIDTH) {
                const int count = int(std::min<int64_t>(WIDTH, last - first));
                const Place<T> place(a.pieces, piece, a.pages, a.page_stride, first * a.states);
                std::fill(room.begin(), room.end(), Lanes{});
                turn(a.A + first * a.states, a.states, count, a.states, A, WIDTH);
                if (!place.is_new) turn(place.state, a.states, count, a.states, held, WIDTH);
                scan_channels<T>(a, start, end, first, count, held, A);
                turn(held, WIDTH, a.states, count, place.state, a.states);
                if (place.saved) turn(held, WIDTH, a.states, count, place.saved, a.states);
            }
        }
    }
}

// Up to WIDTH channels of all tokens of a piece: h = exp(g) h + x.
template <class T>
void sum_channels(const Sum& a, int64_t piece, int64_t first, int count) {
    const Place<T> place(a.pieces, piece, a.pages, a.page_stride, first);
    const int64_t start = a.pieces.start[piece], end = start + a.pieces.length[piece];
    Lanes sum = place.is_new ? Lanes{} : load_some(place.state, count);
    for (int64_t t = start; t < end; t++) {
        const Lanes decay = exponential(load_some(a.g + t * a.g_token + first, count));
        sum = fused(decay, sum, load_some(a.x + t * a.x_token + first, count));
        store_some(sum, a.out + t * a.channels + first, count);
        sum = rounded<T>(sum);
    }
    store_some(sum, place.state, count);
    if (place.saved) store_some(sum, place.saved, count);
}

template <class T>
void sum(const Sum& a) {
    constexpr int BLOCK = 4 * WIDTH;
    const int64_t blocks = (a.channels + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(dynamic) if (tokens_of(a.pieces) * a.channels > WORTH_THREADS)
    for (int64_t work = 0; work < a.pieces.count * blocks; work++) {
        const int64_t block = work % blocks * BLOCK, last = std::min<int64_t>(block + BLOCK, a.channels);
        for (int64_t first = block; first < last; first += WIDTH)
            sum_channels<T>(a, work / blocks, first, int(std::min<int64_t>(WIDTH, last - first)));
    }
}

// Where each lane of W vectors comes from when numbers move among them: `lane[to][v]` chooses between what came of the
// vectors before v (lanes below WIDTH) and vector v.
template <int W>
struct Moves {
    int32_t lane[W][W][WIDTH] = {};

    template <class Places>
    constexpr explicit Moves(Places place) {
        for (int to = 0; to < W; to++)
            for (int v = 1; v < W; v++)
                for (int i = 0; i < WIDTH; i++) {
                    const int at = place(to, i);
                    lane[to][v][i] = at / WIDTH == v ? WIDTH + at % WIDTH : v == 1 && at < WIDTH ? at : i;
                }
    }
    Lanes to(int to, const Lanes* from) const {
        Lanes result = from[0];
        for (int v = 1; v < W; v++) {
            Ints which;
            std::memcpy(&which, lane[to][v], sizeof which);
            result = __builtin_shuffle(result, from[v], which);
        }
        return result;
    }
};
// Windows of W numbers of WIDTH channels as W vectors of channels, and back.
template <int W, class T>
inline void open_windows(const T* from, Lanes* to) {
    static constexpr Moves<W> moves([](int w, int c) { return c * W + w; });
    Lanes numbers[W];
    for (int w = 0; w < W; w++) numbers[w] = load_lanes(from + w * WIDTH);
    for (int w = 0; w < W; w++) to[w] = moves.to(w, numbers);
}
template <int W, class T>
inline void close_windows(const Lanes* from, T* to) {
    static constexpr Moves<W> moves([](int v, int i) { return (v * WIDTH + i) % W * WIDTH + (v * WIDTH + i) / W; });
    for (int v = 0; v < W; v++) store_lanes(moves.to(v, from), to + v * WIDTH);
}

// -- convolutions ------------------------------------------------------------------------------------------------------

// Up to WIDTH channels of a convolution: what their tokens bring, and where it goes.
template <class T>
struct Channels {
    const Convolution& a;
    int64_t first;
    int count;

    const T* at(const void* tokens, int64_t t, int64_t stride) const {
        return static_cast<const T*>(tokens) + t * stride + first;
    }
    Lanes bias() const { return load_some(at(a.bias, 0, 0), count); }
    Lanes newest(int64_t t) const {
        const Lanes x = load_some(at(a.x, t, a.x_token), count);
        return a.before ? rounded<T>(x * load_some(at(a.before, t, a.before_token), count)) : x;
    }
    void finish(Lanes sum, int64_t t) const {
        if (a.activates) sum = silu(rounded<T>(sum));
        if (a.after) sum = rounded<T>(sum) * load_some(at(a.after, t, a.after_token), count);
        store_some(sum, static_cast<T*>(a.out) + t * a.channels + first, count);
    }
};

// Tokens [start, end) over W earlier inputs each: weights [W + 1], `padded` apart; x [W + 1], of which the first W are
// those inputs.
template <int W, class T>
inline void convolve_known(const Channels<T>& c, int64_t start, int64_t end, const float* weights, int64_t padded,
                           Lanes* x) {
    const Lanes bias = c.bias();
    Lanes w[W + 1];
    for (int i = 0; i <= W; i++) w[i] = load_lanes(weights + i * padded);
    for (int64_t t = start; t < end; t++) {
        x[W] = c.newest(t);
        Lanes sum = bias;
        for (int i = 0; i <= W; i++) sum = fused(w[i], x[i], sum);
        for (int i = 0; i < W; i++) x[i] = x[i + 1];
        c.finish(sum, t);
    }
}

// The same over any number of earlier inputs.
template <class T>
inline void convolve_any(const Channels<T>& c, int64_t start, int64_t end, const float* weights, int64_t padded,
                         T (*seen)[WIDTH]) {
    const int window = c.a.window;
    for (int64_t t = start; t < end; t++) {
        const Lanes newest = c.newest(t);
        Lanes sum = c.bias();
        for (int i = 0; i < window; i++) sum = fused(load_lanes(weights + i * padded), load_lanes(seen[i]), sum);
        sum = fused(load_lanes(weights + window * padded), newest, sum);
        for (int i = 0; i + 1 < window; i++) store_lanes(load_lanes(seen[i + 1]), seen[i]);
        if (window) store_lanes(newest, seen[window - 1]);
        c.finish(sum, t);
    }
}

// Up to WIDTH channels of all tokens of a piece. W: the window, or 0 for any.
template <int W, class T>
inline void convolve_channels(const Channels<T>& c, int64_t piece, const float* weights, int64_t padded,
                              T (*seen)[WIDTH]) {
    const Convolution& a = c.a;
    const Place<T> place(a.pieces, piece, a.pages, a.page_stride, c.first * a.window);
    const int64_t start = a.pieces.start[piece], end = start + a.pieces.length[piece];
    if constexpr (W > 0) {
        if (c.count == WIDTH) {
            Lanes x[W + 1] = {};
            if (!place.is_new) open_windows<W>(place.state, x);
            convolve_known<W, T>(c, start, end, weights, padded, x);
            close_windows<W>(x, place.state);
            if (place.saved) close_windows<W>(x, place.saved);
            return;
        }
    }
    std::memset(static_cast<void*>(seen), 0, sizeof(T) * WIDTH * a.window);
    for (int i = 0; !place.is_new && i < c.count; i++)
        for (int w = 0; w < a.window; w++) seen[w][i] = place.state[i * a.window + w];
    convolve_any<T>(c, start, end, weights, padded, seen);
    for (T* to : {place.state, place.saved})
        for (int i = 0; to && i < c.count; i++)
            for (int w = 0; w < a.window; w++) to[i * a.window + w] = seen[w][i];
}

// The weights of each place in the window side by side: [window + 1, padded].
template <class T>
std::vector<float> turned_weights(const Convolution& a, int64_t padded) {
    const int width = a.window + 1;
    const T* weight = static_cast<const T*>(a.weight);
    std::vector<float> result(width * padded), wide(width * WIDTH);
    for (int64_t c = 0; c < a.channels; c += WIDTH) {
        const int count = int(std::min<int64_t>(WIDTH, a.channels - c)), numbers = count * width;
        for (int i = 0; i < numbers; i += WIDTH) store_lanes(load_some(weight + c * width + i, numbers - i), wide.data() + i);
        turn(wide.data(), width, count, width, result.data() + c, padded);
    }
    return result;
}

template <int W, class T>
void convolve(const Convolution& a) {
    constexpr int BLOCK = 4 * WIDTH;
    const int64_t blocks = (a.channels + BLOCK - 1) / BLOCK, padded = blocks * BLOCK;
    const std::vector<float> weights = turned_weights<T>(a, padded);
#pragma omp parallel if (tokens_of(a.pieces) * a.channels * (a.window + 1) > WORTH_THREADS)
    {
        std::vector<T> room(a.window * WIDTH + 1);
        T(*seen)[WIDTH] = reinterpret_cast<T(*)[WIDTH]>(room.data());
#pragma omp for schedule(dynamic)
        for (int64_t work = 0; work < a.pieces.count * blocks; work++) {
            const int64_t block = work % blocks * BLOCK, last = std::min<int64_t>(block + BLOCK, a.channels);
            for (int64_t first = block; first < last; first += WIDTH) {
                const Channels<T> c{a, first, int(std::min<int64_t>(WIDTH, last - first))};
                convolve_channels<W, T>(c, work / blocks, weights.data() + first, padded, seen);
            }
        }
    }
}

template <class T>
void convolve(const Convolution& a) {
    switch (a.window) {
        case 2: return convolve<2, T>(a);
        case 3: return convolve<3, T>(a);
        default: return convolve<0, T>(a);
    }
}

}  // namespace

extern "C" {

void intarsia_heads(const Heads* a) {
    with_kind(a->kind, [&](auto* number) {
        using T = std::remove_pointer_t<decltype(number)>;
        a->keyed ? heads<KEYED_DELTA, T>(*a) : a->beta ? heads<DELTA, T>(*a) : heads<LINEAR, T>(*a);
    });
}

void intarsia_scan(const Scan* a) {
    with_kind(a->kind, [&](auto* number) { scan<std::remove_pointer_t<decltype(number)>>(*a); });
}

void intarsia_sum(const Sum* a) {
    with_kind(a->kind, [&](auto* number) { sum<std::remove_pointer_t<decltype(number)>>(*a); });
}

void intarsia_convolve(const Convolution* a) {
    with_kind(a->kind, [&](auto* number) { convolve<std::remove_pointer_t<decltype(number)>>(*a); });
}

}  // extern "C"
