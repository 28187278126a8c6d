/* Decoder layers, float32; compiled and called by cpu_layer.py.
 *
 * Everything between two products of a decoding step is small: as calls of torch each part costs
 * more than its arithmetic, on caches that the weights have emptied. Here all layers of a step are one
 * call, attention included; where attention is another's, a layer is two calls around it. A row's
 * result does not depend on the other rows of its step.
 */
#define _POSIX_C_SOURCE 199309L
#include <time.h>

#include "cpu_vec.h"

/* out[rows][outputs] = x[rows][inputs] . w^T + bias; rows of x lie x_stride floats apart. Returns
 * 0, or 1 without memory. cpu_kernels.c and cpu_int8.c have one each. */
typedef int product(const void *weights, const float *x, int64_t x_stride, float *out, int64_t rows,
                    int threads);

/* headwater_decode of cpu_attention.c */
typedef int decode(const float *q, int64_t q_stride, const float *k, const float *v, int64_t slot_stride,
                   int64_t head_stride, const int64_t *runs, const int64_t *first_run, float *out,
                   int64_t out_stride, int64_t sequences, int64_t kv_heads, int64_t group, int64_t dim,
                   float scale, int threads);

/* headwater_chunk of cpu_chunk.c */
typedef int several(const float *q, int64_t q_row_stride, int64_t q_head_stride, const float *k, const float *v,
                    int64_t slot_stride, int64_t kv_head_stride, const int64_t *slots, int64_t first_slot,
                    float *out, int64_t out_row_stride, int64_t out_head_stride, int64_t rows, int64_t start,
                    int64_t window, int64_t kv_heads, int64_t group, int64_t dim, float scale, int threads);

/* Rows row .. row + rows of a step: positions from `start` on of a sequence, whose KV lies in `slots`,
 * or from first_slot on. */
struct chunk {
    int64_t row, rows, start, first_slot;
    const int64_t *slots;
};

/* Where the KV of a step's decodes lies, as a layer's window shows it. */
struct runs {
    const int64_t *slots, *first;
};

struct layer {
    product *multiply; /* with these four */
    const void *qkv, *o, *gate_up, *down;
    const float *norm_before, *norm_after; /* of attention: weights with their offset added */
    const float *q_norm, *k_norm;          /* of each head, or NULL */
    float *keys, *values;                  /* the pool's */
    int64_t slot_stride, head_stride;      /* of both */
    int64_t hidden, heads, kv_heads, dim, between;
    int64_t window; /* which of a step's runs it reads */
    int64_t reach;  /* the window in positions; 0: all */
    float eps, scale;
    int32_t threads;
};

/* What a step works on: a row per token. */
struct step {
    float *x;                /* [hidden]: goes from layer to layer */
    float *normed;           /* [hidden] */
    float *qkv;              /* [(heads + 2 kv_heads) * dim] */
    float *attended;         /* [heads * dim] */
    float *gate_up;          /* [2 * between] */
    const float *cosine, *sine; /* [dim] */
    const int64_t *slots;    /* of the pool, where the row's KV goes */
    int64_t rows;
    /* rows that are decodes, side by side, and the others */
    decode *attend;
    const struct runs *runs; /* by window */
    int64_t first_decode, decodes;
    several *attend_chunk;
    const struct chunk *chunks;
    int64_t chunk_count;
    double *attention; /* NULL, or seconds of wall clock and of CPU that it took so far */
};

#define AHEAD 4096 /* bytes */

/* Fetches the beginning of weights that are read next: a stream of addresses starts slowly. Both
 * kinds of weights have their address first. */
INLINE void fetch_weights(const void *weights) {
    const char *begin = *(const char *const *)weights;
    for (int i = 0; i < AHEAD; i += 64) __builtin_prefetch(begin + i, 0, 2);
}

/* out = x / sqrt(mean(x^2) + eps) * weight; with `more`, x += more before. */
INLINE void norm(float *x, const float *more, const float *weight, float *out, int64_t size, float eps) {
    vec squares = (vec){};
    float sum = 0;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        vec part = load(x + i);
        if (more) store(x + i, part += load(more + i));
        squares += part * part;
    }
    for (; i < size; i++) {
        if (more) x[i] += more[i];
        sum += x[i] * x[i];
    }
    const float factor = 1.0f / sqrtf((sum + sum_of(squares)) / (float)size + eps);
    for (i = 0; i < size; i++) out[i] = x[i] * factor * weight[i];
}

/* Turns pairs (i, i + dim/2) of a head by the angles of its position. */
INLINE void rotate(float *head, const float *cosine, const float *sine, int64_t dim) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i++) {
        const float one = head[i], two = head[i + half];
        head[i] = one * cosine[i] - two * sine[i];
        head[i + half] = two * cosine[i + half] + one * sine[i + half];
    }
}

static void heads_of_row(const struct layer *layer, const struct step *step, int64_t row) {
    const int64_t dim = layer->dim, heads = layer->heads, kv_heads = layer->kv_heads;
    float *q = step->qkv + row * (heads + 2 * kv_heads) * dim, *k = q + heads * dim;
    const float *v = k + kv_heads * dim;
    for (int64_t h = 0; h < heads + kv_heads; h++) {
        const float *weight = h < heads ? layer->q_norm : layer->k_norm;
        if (weight) norm(q + h * dim, NULL, weight, q + h * dim, dim, layer->eps);
        rotate(q + h * dim, step->cosine + row * dim, step->sine + row * dim, dim);
    }
    const int64_t place = step->slots[row] * layer->slot_stride;
    for (int64_t h = 0; h < kv_heads; h++) {
        const int64_t at = place + h * layer->head_stride;
        memcpy(layer->keys + at, k + h * dim, (size_t)dim * sizeof(float));
        memcpy(layer->values + at, v + h * dim, (size_t)dim * sizeof(float));
    }
}

/* From x to queries, and keys and values in the pool. Returns what a product returned. */
int headwater_before_attention(const struct layer *layer, const struct step *step) {
    const int64_t hidden = layer->hidden;
    fetch_weights(layer->qkv);
    for (int64_t row = 0; row < step->rows; row++)
        norm(step->x + row * hidden, NULL, layer->norm_before, step->normed + row * hidden, hidden,
             layer->eps);
    if (layer->multiply(layer->qkv, step->normed, hidden, step->qkv, step->rows, layer->threads)) return 1;
    fetch_weights(layer->o);
    for (int64_t row = 0; row < step->rows; row++) heads_of_row(layer, step, row);
    return 0;
}

/* gate = silu(gate) * up */
INLINE void gated(float *gate, const float *up, int64_t size) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        const vec x = load(gate + i);
        store(gate + i, x / (1.0f + exp_of(-x)) * load(up + i));
    }
    for (; i < size; i++) gate[i] = gate[i] / (1.0f + exp_of((vec){} - gate[i])[0]) * up[i];
}

/* From what was attended to the x of the next layer. Returns what a product returned. */
int headwater_after_attention(const struct layer *layer, const struct step *step) {
    const int64_t hidden = layer->hidden, between = layer->between, rows = step->rows;
    if (layer->multiply(layer->o, step->attended, layer->heads * layer->dim, step->normed, rows,
                        layer->threads))
        return 1;
    fetch_weights(layer->gate_up);
    for (int64_t row = 0; row < rows; row++) {
        float *normed = step->normed + row * hidden;
        norm(step->x + row * hidden, normed, layer->norm_after, normed, hidden, layer->eps);
    }
    if (layer->multiply(layer->gate_up, step->normed, hidden, step->gate_up, rows, layer->threads)) return 1;
    fetch_weights(layer->down);
    for (int64_t row = 0; row < rows; row++) {
        float *gate = step->gate_up + row * 2 * between;
        gated(gate, gate + between, between);
    }
    if (layer->multiply(layer->down, step->gate_up, 2 * between, step->normed, rows, layer->threads)) return 1;
    for (int64_t i = 0; i < rows * hidden; i++) step->x[i] += step->normed[i];
    return 0;
}

static double seconds_of(clockid_t clock) {
    struct timespec time;
    clock_gettime(clock, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

#define NO_MEMORY 1
#define NOT_TAKEN 2

static int attend(const struct layer *layer, const struct step *step) {
    const int64_t dim = layer->dim, width = layer->heads * dim, stride = width + 2 * layer->kv_heads * dim;
    const int64_t group = layer->heads / layer->kv_heads, row = step->first_decode;
    const struct runs *runs = step->runs + layer->window;
    if (step->decodes &&
        step->attend(step->qkv + row * stride, stride, layer->keys, layer->values, layer->slot_stride,
                     layer->head_stride, runs->slots, runs->first, step->attended + row * width, width,
                     step->decodes, layer->kv_heads, group, dim, layer->scale, layer->threads))
        return NOT_TAKEN;
    for (int64_t i = 0; i < step->chunk_count; i++) {
        const struct chunk *chunk = step->chunks + i;
        const int failed = step->attend_chunk(
            step->qkv + chunk->row * stride, stride, dim, layer->keys, layer->values, layer->slot_stride,
            layer->head_stride, chunk->slots, chunk->first_slot, step->attended + chunk->row * width, width,
            dim, chunk->rows, chunk->start, layer->reach, layer->kv_heads, group, dim, layer->scale,
            layer->threads);
        if (failed) return failed == 2 ? NO_MEMORY : NOT_TAKEN;
    }
    return 0;
}

static int attend_timed(const struct layer *layer, const struct step *step) {
    const double wall = seconds_of(CLOCK_MONOTONIC), cpu = seconds_of(CLOCK_PROCESS_CPUTIME_ID);
    const int failed = attend(layer, step);
    step->attention[0] += seconds_of(CLOCK_MONOTONIC) - wall;
    step->attention[1] += seconds_of(CLOCK_PROCESS_CPUTIME_ID) - cpu;
    return failed;
}

/* Returns 0, or what failed. */
int headwater_layers(const struct layer *const *layers, int64_t count, const struct step *step) {
    for (int64_t i = 0; i < count; i++) {
        if (headwater_before_attention(layers[i], step)) return NO_MEMORY;
        const int failed = step->attention ? attend_timed(layers[i], step) : attend(layers[i], step);
        if (failed) return failed;
        if (headwater_after_attention(layers[i], step)) return NO_MEMORY;
    }
    return 0;
}
