// Tokens drawn from logits on a CPU, and log-probabilities. Plain C ABI; see sampling/cpu.py.
//
// A row is read in blocks of 64 tokens, and worked on in pieces of 256 blocks, which threads share. What comes of a piece
// depends on it alone, and pieces are combined in order: so a row's result depends neither on other rows nor on threads.
//
// Nothing is sorted but a few candidates. The greatest logit of each block is known from the first reading; the n-th
// greatest of these is a floor that at least n tokens reach, and only blocks that reach it need to be looked into.

#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <type_traits>
#include <vector>

#include "elementwise.h"

extern "C" {

struct Edit {
    int64_t token;
    float value;
    int32_t is_added;  // or takes the place of the logit
};

struct Changes {  // of a row's logits, in this order
    const int64_t *said, *counts;  // tokens of the sequence, ascending; how often each is in the answer
    const Edit* edits;
    const uint8_t* allowed;  // a bit per token, lowest first; or null: all are
    int64_t said_count, edit_count, allowed_bytes;
    float repetition, presence, frequency;
};

struct Draws {
    const void* logits;              // [R, V]
    const double* settings;          // [R, 4] temperature, top_k, top_p, min_p; null: all rows are greedy
    const int32_t* keys;             // [R, 2] of the random numbers
    const Changes* const* changes;   // [R], null where there are none; or null
    int64_t* tokens;                 // [R]
    int64_t row_stride, rows, vocab;
    int32_t kind;
};

struct Logprobs {
    const void* logits;     // [R, V]
    const int64_t* tokens;  // [R]
    float* of_tokens;       // [R]
    int64_t* ranks;         // [R]
    int64_t* top;           // [R, count]
    float* of_top;          // [R, count]
    int64_t row_stride, rows, vocab, count;
    int32_t kind;
};

}  // extern "C"

namespace {

constexpr int BLOCK = 64, VECTORS = BLOCK / WIDTH;
constexpr int64_t PIECE = 256;                // blocks
constexpr int64_t ROWS_AT_ONCE = 64;          // so that what is kept of each row stays small
constexpr int64_t WORTH_SHARING = 1 << 15;    // numbers of which it pays to wake the other threads
constexpr float NONE = -std::numeric_limits<float>::infinity();
constexpr float HIGHEST_LOGIT = 1e30f;        // as in protocol.py
constexpr float FURTHEST = -70.0f;            // what lies further below the greatest logit has a weight of 0
constexpr float LEAST_WEIGHT = 7e-31f;        // but for 0

// -- rows --------------------------------------------------------------------------------------------------------------

// The logits of a row as its changes leave them. Nothing is copied: few tokens have a number of their own.
template <class T>
class Row {
  public:
    Row() = default;
    Row(const T* logits, int64_t vocab, const Changes* changes)
        : blocks((vocab + BLOCK - 1) / BLOCK), vocab(vocab), logits(logits) {
        if (!changes) return;
        allowed = changes->allowed;
        allowed_bytes = changes->allowed_bytes;
        collect_tokens(*changes);
        penalize(*changes);
        for (int64_t i = 0; i < changes->edit_count; i++) {
            const Edit& edit = changes->edits[i];
            if (edit.token < 0 || edit.token >= vocab) continue;
            float& value = values[std::lower_bound(tokens.begin(), tokens.end(), edit.token) - tokens.begin()];
            value = edit.is_added ? value + edit.value : edit.value;
        }
    }

    // Those of a block, `NONE` behind the last token.
    inline void load(int64_t block, Lanes* v) const {
        const T* from = logits + block * BLOCK;
        if ((block + 1) * BLOCK <= vocab && !allowed && (first_of_block.empty() || !changes_in(block)))
            for (int i = 0; i < VECTORS; i++) v[i] = load_lanes(from + i * WIDTH);
        else
            load_changed(block, v);
    }

    float at(int64_t token) const {
        Lanes v[VECTORS];
        float numbers[BLOCK];
        load(token / BLOCK, v);
        for (int i = 0; i < VECTORS; i++) store_lanes(v[i], numbers + i * WIDTH);
        return numbers[token % BLOCK];
    }

    int64_t blocks = 0, vocab = 0;

  private:
    bool changes_in(int64_t block) const { return first_of_block[block] != first_of_block[block + 1]; }

    void collect_tokens(const Changes& changes) {
        for (int64_t i = 0; i < changes.said_count; i++)
            if (changes.said[i] < vocab) tokens.push_back(changes.said[i]);
        const size_t said = tokens.size();
        for (int64_t i = 0; i < changes.edit_count; i++) {
            const int64_t token = changes.edits[i].token;
            if (token >= 0 && token < vocab) tokens.push_back(token);
        }
        if (tokens.empty()) return;
        std::sort(tokens.begin() + said, tokens.end());
        std::inplace_merge(tokens.begin(), tokens.begin() + said, tokens.end());
        tokens.erase(std::unique(tokens.begin(), tokens.end()), tokens.end());
        values.reserve(tokens.size());
        first_of_block.resize(blocks + 1);
        for (int64_t token : tokens) {
            values.push_back(to_float(logits[token]));
            first_of_block[token / BLOCK + 1]++;
        }
        for (int64_t block = 0; block < blocks; block++) first_of_block[block + 1] += first_of_block[block];
    }

    void penalize(const Changes& changes) {
        for (int64_t i = 0, at = 0; i < changes.said_count && changes.said[i] < vocab; i++) {
            while (tokens[at] != changes.said[i]) at++;
            float& value = values[at];
            if (changes.repetition != 1) {
                value = value > 0 ? value / changes.repetition : value * changes.repetition;
                value = value < -HIGHEST_LOGIT ? -HIGHEST_LOGIT : value > HIGHEST_LOGIT ? HIGHEST_LOGIT : value;
            }
            if (changes.counts[i]) value -= changes.presence + changes.frequency * float(changes.counts[i]);
        }
    }

    __attribute__((noinline)) void load_changed(int64_t block, Lanes* v) const {
        const int64_t first = block * BLOCK, count = std::min<int64_t>(BLOCK, vocab - first);
        float numbers[BLOCK];
        for (int i = 0; i < BLOCK; i++) numbers[i] = i < count ? to_float(logits[first + i]) : NONE;
        if (!first_of_block.empty())
            for (int32_t i = first_of_block[block]; i < first_of_block[block + 1]; i++)
                numbers[tokens[i] - first] = values[i];
        if (allowed) {
            uint8_t bits[BLOCK / 8] = {};
            const int64_t bytes = std::min<int64_t>(BLOCK / 8, allowed_bytes - first / 8);
            if (bytes > 0) std::memcpy(bits, allowed + first / 8, bytes);
            for (int i = 0; i < BLOCK; i++)
                if (!(bits[i / 8] >> (i % 8) & 1)) numbers[i] = NONE;
        }
        for (int i = 0; i < VECTORS; i++) v[i] = load_lanes(numbers + i * WIDTH);
    }

    const T* logits = nullptr;
    const uint8_t* allowed = nullptr;
    int64_t allowed_bytes = 0;
    std::vector<int64_t> tokens;          // that have a number of their own, ascending
    std::vector<float> values;            // these numbers
    std::vector<int32_t> first_of_block;  // [blocks + 1] into both; empty if there are none
};

// -- the first reading -------------------------------------------------------------------------------------------------

inline float greatest_of(Lanes v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(v);
#else
    float lanes[WIDTH];
    store_lanes(v, lanes);
    for (int half = WIDTH / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
    return lanes[0];
#endif
}

// What is known of a row, or of a piece of it, from its first reading.
struct Summary {
    float most = NONE;  // NaN aside
    bool has_nan = false;
    bool is_usable() const { return !has_nan && std::isfinite(most); }  // differences to the greatest are numbers
};

// Of the blocks in [first, last); and the greatest number of each.
template <class T>
Summary find_maxima(const Row<T>& row, int64_t first, int64_t last, float* maxima) {
    Ints is_nan = {};
    Summary summary;
    for (int64_t block = first; block < last; block++) {
        Lanes v[VECTORS], most = all_lanes(NONE);
        row.load(block, v);
        for (int i = 0; i < VECTORS; i++) {
            is_nan |= v[i] != v[i];
            most = larger(v[i], most);
        }
        maxima[block] = greatest_of(most);
        summary.most = std::max(summary.most, maxima[block]);
    }
    for (int i = 0; i < WIDTH; i++) summary.has_nan |= is_nan[i] != 0;
    return summary;
}

// The first token of which this is true.
template <class T, class Condition>
int64_t first_token(const Row<T>& row, int64_t block, Condition is_true) {
    for (; block < row.blocks; block++)
        for (int64_t token = block * BLOCK; token < std::min((block + 1) * BLOCK, row.vocab); token++)
            if (is_true(row.at(token))) return token;
    return 0;
}

// The first of the greatest; NaN counts as greater than all.
template <class T>
int64_t most_probable(const Row<T>& row, const float* maxima, const Summary& summary) {
    if (summary.has_nan) return first_token(row, 0, [](float x) { return std::isnan(x); });
    const int64_t block = std::find(maxima, maxima + row.blocks, summary.most) - maxima;
    return first_token(row, block, [&](float x) { return x == summary.most; });
}

// -- weights -----------------------------------------------------------------------------------------------------------

// How far a logit lies below the greatest, once divided by the temperature.
struct Distance {
    Distance() = default;
    Distance(float most, float temperature) : temperature(temperature), most(most / temperature) {}
    inline Lanes operator()(Lanes x) const { return x / all_lanes(temperature) - all_lanes(most); }
    inline float operator()(float x) const { return x / temperature - most; }
    float temperature = 1, most = 0;
};

// e to the power of each distance: chances, but for their sum. Of less than about 1e-30 nothing.
inline Lanes weight(Lanes distance) {
    const Lanes high = distance * LOG2_E;
    const Lanes rest = fused(distance, all_lanes(LOG2_E), -high);
    return power_of_two(high, fused(distance, all_lanes(LOG2_E_REST), rest));
}

// Of the blocks in [first, last).
template <class T>
double sum_of_weights(const Row<T>& row, int64_t first, int64_t last, const float* maxima, const Distance& distance) {
    typedef double Doubles __attribute__((vector_size(8 * WIDTH)));
    Doubles sums = {};
    for (int64_t block = first; block < last; block++) {
        if (distance(maxima[block]) < FURTHEST) continue;
        Lanes v[VECTORS], sum = {};
        row.load(block, v);
        for (int i = 0; i < VECTORS; i++) sum += weight(distance(v[i]));
        sums += __builtin_convertvector(sum, Doubles);
    }
    double total = 0;
    for (int i = 0; i < WIDTH; i++) total += sums[i];
    return total;
}

// -- the race ----------------------------------------------------------------------------------------------------------

// Which lanes of a are greater than those of b, a bit each.
inline uint32_t greater_lanes(Lanes a, Lanes b) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ);
#elif defined(__AVX2__) && defined(__FMA__)
    return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)));
#else
    uint32_t bits = 0;
    for (int i = 0; i < WIDTH; i++) bits |= uint32_t(a[i] > b[i]) << i;
    return bits;
#endif
}

// Tokens run for times of an exponential distribution, at rates of their weights: see plain_torch.py.
class Race {
  public:
    explicit Race(const int32_t* keys) : first_key(uint32_t(keys[0])), second_key(uint32_t(keys[1])) {}

    void run(Lanes weights, Unsigned tokens) {
        Unsigned bits = tokens * 0x9E3779B1u + first_key;
        bits ^= bits >> 16;
        bits *= 0x21F0AAADu;
        bits += second_key;
        bits ^= bits >> 15;
        bits *= 0xD35A2D97u;
        bits ^= bits >> 15;
        Lanes uniform = __builtin_convertvector(same_bits<Ints>(bits), Lanes) * 0x1p-32f + 0.5f;
        uniform = larger(all_lanes(0x1p-33f), smaller(all_lanes(1 - 0x1p-24f), uniform));
        // A time is never shorter than its uniform number, so that hardly any token needs a logarithm.
        for (uint32_t left = greater_lanes(weights, uniform * bound); left; left &= left - 1) {
            const int lane = __builtin_ctz(left);
            arrive(weights[lane] / -std::log1p(-uniform[lane]), tokens[lane]);
        }
    }

    // Of equal ones the first token wins.
    void arrive(float score, int64_t token) {
        if (score < best || (score == best && token >= winner)) return;
        best = score;
        winner = token;
        bound = best * (1 - 1e-6f);
        out_of_reach = std::max(FURTHEST, std::log(best) - 22.9f);  // no time is shorter than 2^-33
    }

    float best = 0, out_of_reach = FURTHEST;  // as a distance
    int64_t winner = std::numeric_limits<int64_t>::max();

  private:
    uint32_t first_key, second_key;
    float bound = 0;
};

inline Unsigned counted_from(int64_t first) {
    Unsigned places = {};
    for (int i = 0; i < WIDTH; i++) places[i] = uint32_t(first + i);
    return places;
}

// All tokens of the blocks in [first, last) whose weight is `least` or more.
template <class T>
void race_all(const Row<T>& row, int64_t first, int64_t last, const float* maxima, const Distance& distance, float least,
              Race& race) {
    const float shortest = least > 0 ? std::log(least) - 1e-3f : FURTHEST;
    for (int64_t block = first; block < last; block++) {
        if (distance(maxima[block]) < std::max(shortest, race.out_of_reach)) continue;
        Lanes v[VECTORS];
        row.load(block, v);
        Unsigned tokens = counted_from(block * BLOCK);
        for (int i = 0; i < VECTORS; i++, tokens += WIDTH) {
            const Lanes weights = weight(distance(v[i]));
            race.run(same_bits<Lanes>(same_bits<Ints>(weights) & (weights >= least)), tokens);
        }
    }
}

// -- candidates --------------------------------------------------------------------------------------------------------

// One number for a value and its token: the greater comes first in a stable descending sort by values.
typedef uint64_t Candidate;

inline Candidate candidate(float value, int64_t token) {
    const uint32_t bits = same_bits<uint32_t>(value), ordered = bits ^ (bits >> 31 ? 0xFFFFFFFFu : 0x80000000u);
    return uint64_t(ordered) << 32 | uint32_t(~uint32_t(token));
}
inline int64_t token_of(Candidate c) { return uint32_t(~uint32_t(c)); }
inline float value_of(Candidate c) {
    const uint32_t ordered = uint32_t(c >> 32);
    return same_bits<float>(ordered ^ (ordered >> 31 ? 0x80000000u : 0xFFFFFFFFu));
}

// A distance that at least `count` tokens reach, and all that could be equal to these once rounded; NONE for all.
float floor_of(int64_t count, const float* maxima, int64_t blocks, const Distance& distance) {
    if (count > blocks) return NONE;
    std::vector<float> most(count);
    std::partial_sort_copy(maxima, maxima + blocks, most.begin(), most.end(), std::greater<float>());
    const float floor = distance(most.back());
    return floor - 1e-6f * (16 - floor);
}

// Tokens that reach the floor. Value: of vectors of distances; those below `least` are left out.
template <class T, class Value>
void collect(const Row<T>& row, const float* maxima, const Distance& distance, float floor, float least, Value value,
             std::vector<Candidate>& found) {
    found.clear();
    for (int64_t block = 0; block < row.blocks; block++) {
        if (distance(maxima[block]) < floor) continue;
        Lanes v[VECTORS];
        float distances[BLOCK], values[BLOCK];
        row.load(block, v);
        for (int i = 0; i < VECTORS; i++) {
            const Lanes each = distance(v[i]);
            store_lanes(each, distances + i * WIDTH);
            store_lanes(value(each), values + i * WIDTH);
        }
        const int64_t first = block * BLOCK, count = std::min<int64_t>(BLOCK, row.vocab - first);
        for (int i = 0; i < count; i++)
            if (!(distances[i] < floor) && !(values[i] < least)) found.push_back(candidate(values[i], first + i));
    }
}

// How a row leaves improbable tokens out.
struct Cut {
    // Is a token kept that so many more probable ones are before, of so much weight? The first always is.
    bool keeps(int64_t rank, double before) const { return !rank || (rank < top_k && float(before / total) < top_p); }
    int64_t top_k;  // all: the vocabulary's size
    float top_p, least_weight;
    double total;  // weight of all tokens; infinite where top_p does not matter
};

// Put the tokens that a cut keeps first; how many. The probable half of what is undecided is weighed each time.
int64_t keep(std::vector<Candidate>& all, const Cut& cut) {
    auto by_value = std::greater<Candidate>();
    auto mass_of = [&](size_t first, size_t last) {
        double mass = 0;
        for (; first < last; first++) mass += value_of(all[first]);
        return mass;
    };
    size_t first = 0, last = all.size();  // tokens before the first are kept, those from the last on are not
    double before = 0;
    while (last - first > 32) {
        Candidate a = all[first], b = all[(first + last) / 2], c = all[last - 1];
        const Candidate middle = std::max(std::min(a, b), std::min(std::max(a, b), c));
        const size_t border = std::partition(all.begin() + first, all.begin() + last,
                                             [&](Candidate each) { return each >= middle; }) - all.begin();
        const double mass = mass_of(first, border);
        if (cut.keeps(border, before + mass)) {
            before += mass;
            first = border;
        } else {
            last = border;
        }
    }
    std::sort(all.begin() + first, all.begin() + last, by_value);
    for (; first < last && cut.keeps(first, before); first++) before += value_of(all[first]);
    return int64_t(first);
}

// The tokens that a cut keeps. Most rows keep few, so few are looked at first.
template <class T>
void find_kept(const Row<T>& row, const float* maxima, const Distance& distance, const Cut& cut,
               std::vector<Candidate>& found) {
    const int64_t few = std::isfinite(cut.total) ? 64 : cut.top_k;
    for (int64_t count = std::min(few, cut.top_k);; count = std::min(count * 8, cut.top_k)) {
        const float floor = floor_of(count, maxima, row.blocks, distance);
        const float least = std::max(cut.least_weight, LEAST_WEIGHT), unseen = std::exp(floor) * (1 + 4e-6f);
        collect(row, maxima, distance, floor, least, weight, found);
        const int64_t kept = keep(found, cut);
        // None that has not been looked at is kept, if one was left out that weighs more than all of these.
        const auto left_out = std::max_element(found.begin() + kept, found.end());
        if (count >= cut.top_k || unseen < least || (left_out != found.end() && value_of(*left_out) > unseen))
            return found.resize(kept);
    }
}

void race_some(const std::vector<Candidate>& some, Race& race) {
    for (size_t first = 0; first < some.size(); first += WIDTH) {
        float weights[WIDTH] = {};
        Unsigned tokens = {};
        for (size_t i = first; i < std::min(first + WIDTH, some.size()); i++) {
            weights[i - first] = value_of(some[i]);
            tokens[i - first] = uint32_t(token_of(some[i]));
        }
        race.run(load_lanes(weights), tokens);
    }
}

// -- rows side by side -------------------------------------------------------------------------------------------------

// Rows that have been read once.
template <class T>
struct Rows {
    Rows(const void* logits, int64_t row_stride, int64_t first, int64_t count, int64_t vocab,
         const Changes* const* changes)
        : count(count), blocks((vocab + BLOCK - 1) / BLOCK), pieces((blocks + PIECE - 1) / PIECE),
          rows(count), summaries(count), maxima(new float[count * blocks]) {
        is_shared = count * vocab > WORTH_SHARING;
        std::vector<Summary> of_pieces(count * pieces);
#pragma omp parallel if (is_shared)
        {
#pragma omp for schedule(static)
            for (int64_t r = 0; r < count; r++)
                rows[r] = Row<T>(static_cast<const T*>(logits) + (first + r) * row_stride, vocab,
                                 changes ? changes[first + r] : nullptr);
#pragma omp for schedule(static)
            for (int64_t work = 0; work < count * pieces; work++)
                of_pieces[work] = find_maxima(rows[work / pieces], begin(work), end(work), maxima_of(work / pieces));
        }
        for (int64_t work = 0; work < count * pieces; work++) {
            Summary& summary = summaries[work / pieces];
            summary.most = std::max(summary.most, of_pieces[work].most);
            summary.has_nan |= of_pieces[work].has_nan;
        }
    }

    // Calls what(row, piece, first block, last block) for each piece of each row.
    template <class Function>
    void for_each_piece(Function what) const {
#pragma omp parallel for schedule(static) if (is_shared)
        for (int64_t work = 0; work < count * pieces; work++)
            what(work / pieces, work % pieces, begin(work), end(work));
    }
    template <class Function>
    void for_each_row(Function what) const {
#pragma omp parallel for schedule(dynamic) if (is_shared && count > 1)
        for (int64_t r = 0; r < count; r++) what(r);
    }

    int64_t begin(int64_t work) const { return work % pieces * PIECE; }
    int64_t end(int64_t work) const { return std::min(blocks, begin(work) + PIECE); }
    float* maxima_of(int64_t row) const { return maxima.get() + row * blocks; }

    int64_t count, blocks, pieces;
    bool is_shared;
    std::vector<Row<T>> rows;
    std::vector<Summary> summaries;
    std::unique_ptr<float[]> maxima;  // [count, blocks]
};

struct Settings {
    Settings(const double* of_row, int64_t vocab)
        : temperature(float(std::min(std::max(of_row[0], 1e-6), 1e30))), top_p(float(of_row[2])),
          min_p(float(of_row[3])), top_k(of_row[1] > 0 ? std::min(int64_t(of_row[1]), vocab) : vocab),
          is_random(of_row[0] > 0), is_cut(of_row[1] > 0 || top_p < 1) {}
    float temperature, top_p, min_p;
    int64_t top_k;
    bool is_random, is_cut;  // other than by min_p
};

template <class T>
void draw_random(const Draws& d, int64_t first, const Rows<T>& all) {
    std::vector<Settings> settings;
    std::vector<Distance> distances;
    for (int64_t r = 0; r < all.count; r++) {
        settings.emplace_back(d.settings + (first + r) * 4, d.vocab);
        distances.emplace_back(all.summaries[r].most, settings[r].temperature);
    }
    auto is_drawn = [&](int64_t r) {
        return settings[r].is_random && all.summaries[r].is_usable() && std::isfinite(distances[r].most);
    };
    // Pieces by themselves: who wins, or how much they weigh.
    std::vector<Race> races(all.count * all.pieces, Race(d.keys));
    std::vector<double> masses(all.count * all.pieces);
    all.for_each_piece([&](int64_t r, int64_t piece, int64_t begin, int64_t end) {
        if (!is_drawn(r)) return;
        const int64_t place = r * all.pieces + piece;
        if (!settings[r].is_cut) {
            Race race(d.keys + (first + r) * 2);
            race_all(all.rows[r], begin, end, all.maxima_of(r), distances[r], settings[r].min_p, race);
            races[place] = race;
        } else if (settings[r].top_p < 1) {
            masses[place] = sum_of_weights(all.rows[r], begin, end, all.maxima_of(r), distances[r]);
        }
    });
    all.for_each_row([&](int64_t r) {
        if (!settings[r].is_random) return;
        int64_t& token = d.tokens[first + r];
        token = 0;  // as argmax says of chances that are all NaN
        if (!is_drawn(r)) return;
        Race race(d.keys + (first + r) * 2);
        if (settings[r].is_cut) {
            Cut cut = {settings[r].top_k, settings[r].top_p, settings[r].min_p, HUGE_VAL};
            if (cut.top_p < 1) cut.total = std::accumulate(&masses[r * all.pieces], &masses[r * all.pieces] + all.pieces, 0.0);
            std::vector<Candidate> kept;
            find_kept(all.rows[r], all.maxima_of(r), distances[r], cut, kept);
            race_some(kept, race);
        } else {
            for (int64_t piece = 0; piece < all.pieces; piece++) {
                const Race& other = races[r * all.pieces + piece];
                if (other.best > 0) race.arrive(other.best, other.winner);
            }
        }
        token = race.winner;
    });
}

template <class T>
void draw(const Draws& d) {
    for (int64_t first = 0; first < d.rows; first += ROWS_AT_ONCE) {
        const int64_t count = std::min(ROWS_AT_ONCE, d.rows - first);
        const Rows<T> all(d.logits, d.row_stride, first, count, d.vocab, d.changes);
        for (int64_t r = 0; r < count; r++)
            if (!d.settings || !(d.settings[(first + r) * 4] > 0))
                d.tokens[first + r] = most_probable(all.rows[r], all.maxima_of(r), all.summaries[r]);
        if (d.settings) draw_random(d, first, all);
    }
}

// -- log-probabilities -------------------------------------------------------------------------------------------------

// How many tokens are more probable than one, and one.
template <class T>
int64_t rank_of(float logprob, const Row<T>& row, const float* maxima, const Distance& distance, float log_of_sum) {
    int64_t rank = 1;
    for (int64_t block = 0; block < row.blocks; block++) {
        if (!(distance(maxima[block]) - log_of_sum > logprob)) continue;
        Lanes v[VECTORS];
        row.load(block, v);
        for (int i = 0; i < VECTORS; i++)
            rank += __builtin_popcount(greater_lanes(distance(v[i]) - log_of_sum, all_lanes(logprob)));
    }
    return rank;
}

template <class T>
void top_logprobs(const Logprobs& l, int64_t r, const Row<T>& row, const float* maxima, const Distance& distance,
                  float log_of_sum) {
    std::vector<Candidate> found;
    const float floor = std::isnan(log_of_sum) ? NONE : floor_of(l.count, maxima, row.blocks, distance);
    collect(row, maxima, distance, floor, NONE, [&](Lanes each) { return each - log_of_sum; }, found);
    std::partial_sort(found.begin(), found.begin() + l.count, found.end(), std::greater<Candidate>());
    for (int64_t i = 0; i < l.count; i++) {
        l.top[r * l.count + i] = token_of(found[i]);
        l.of_top[r * l.count + i] = value_of(found[i]);
    }
}

template <class T>
void logprobs(const Logprobs& l) {
    for (int64_t first = 0; first < l.rows; first += ROWS_AT_ONCE) {
        const Rows<T> all(l.logits, l.row_stride, first, std::min(ROWS_AT_ONCE, l.rows - first), l.vocab, nullptr);
        std::vector<double> masses(all.count * all.pieces);
        all.for_each_piece([&](int64_t r, int64_t piece, int64_t begin, int64_t end) {
            const Distance distance(all.summaries[r].most, 1);
            masses[r * all.pieces + piece] = sum_of_weights(all.rows[r], begin, end, all.maxima_of(r), distance);
        });
        all.for_each_row([&](int64_t r) {
            const Row<T>& row = all.rows[r];
            const Distance distance(all.summaries[r].most, 1);
            const double total = std::accumulate(&masses[r * all.pieces], &masses[r * all.pieces] + all.pieces, 0.0);
            const float log_of_sum = all.summaries[r].is_usable() ? float(std::log(total)) : NAN;
            const float logprob = distance(row.at(l.tokens[first + r])) - log_of_sum;
            l.of_tokens[first + r] = logprob;
            l.ranks[first + r] = rank_of(logprob, row, all.maxima_of(r), distance, log_of_sum);
            if (l.count) top_logprobs(l, first + r, row, all.maxima_of(r), distance, log_of_sum);
        });
    }
}

}  // namespace

extern "C" {

void intarsia_draw(const Draws* d) {
    with_kind(d->kind, [&](auto* number) { draw<std::remove_pointer_t<decltype(number)>>(*d); });
}

void intarsia_logprobs(const Logprobs* l) {
    with_kind(l->kind, [&](auto* number) { logprobs<std::remove_pointer_t<decltype(number)>>(*l); });
}

}  // extern "C"
