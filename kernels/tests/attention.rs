//! Decode attention against naive f64 attention, and prefill attention against both.

mod common;

use common::*;
use forebay_kernels::attention::{AttentionScratch, KvPiece, attend};
use forebay_kernels::prefill_attention::{KvElement, KvRecords, PrefillAttention};
use forebay_kernels::{Isa, Pool};
use half::f16;

for_each_isa!(
    pieces_of_all_capacities,
    head_dims_and_group_sizes,
    long_caches_are_partitioned,
    attention_does_not_depend_on_threads,
    attention_of_nothing_is_zero,
    not_a_number_stays_in_its_head,
    large_scores_do_not_overflow,
    prefill_equals_naive,
    prefill_in_chunks_equals_decode,
    prefill_does_not_depend_on_threads,
    prefill_of_unaligned_records,
);

/// Keys and values of a sequence, `[tokens][kv_heads][d]`.
struct Sequence {
    k: Vec<f16>,
    v: Vec<f16>,
    kv_heads: usize,
    d: usize,
}

impl Sequence {
    fn new(random: &mut Random, tokens: usize, kv_heads: usize, d: usize) -> Sequence {
        let len = tokens * kv_heads * d;
        Sequence { k: random.f16s(len), v: random.f16s(len), kv_heads, d }
    }

    fn tokens(&self) -> usize {
        self.k.len() / (self.kv_heads * self.d)
    }

    fn row<'a>(&self, all: &'a [f16], token: usize, kv_head: usize) -> &'a [f16] {
        &all[(token * self.kv_heads + kv_head) * self.d..][..self.d]
    }

    /// Attention of one query, `[heads][d]`, to the first `tokens` tokens, and a bound of the rounding errors per head.
    fn naive(&self, q: &[f32], tokens: usize, scale: f32) -> (Vec<f64>, Vec<f64>) {
        let heads = q.len() / self.d;
        let (mut out, mut bounds) = (Vec::new(), Vec::new());
        for (head, q) in q.chunks(self.d).enumerate() {
            let kv_head = head / (heads / self.kv_heads);
            let mut scores = Vec::new();
            let (mut largest_magnitude, mut largest_value) = (0.0f64, 0.0f64);
            for token in 0..tokens {
                let k = self.row(&self.k, token, kv_head).iter().map(|x| x.to_f64());
                let (score, magnitude) = dot(q.iter().map(|&x| f64::from(x)), k);
                scores.push(score * f64::from(scale));
                largest_magnitude = largest_magnitude.max(magnitude * f64::from(scale.abs()));
                largest_value =
                    self.row(&self.v, token, kv_head).iter().fold(largest_value, |l, x| l.max(x.to_f64().abs()));
            }
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
            let total: f64 = weights.iter().sum();
            for i in 0..self.d {
                let sum: f64 = (0..tokens).map(|t| weights[t] * self.row(&self.v, t, kv_head)[i].to_f64()).sum();
                out.push(if tokens == 0 { 0.0 } else { sum / total });
            }
            // Scores are wrong by the error of a sum of `d` products and of its rounding in log 2; weights relatively by as much, and
            // by that of the exponential; then sums over the tokens.
            let score_error = (self.d as f64 + 4.0) * EPSILON * largest_magnitude;
            bounds.push(largest_value * (2.0 * score_error + (8.0 + 2.0 * (tokens as f64).sqrt()) * EPSILON));
        }
        (out, bounds)
    }

    /// The tokens `range` laid out as a piece of `capacity` tokens, room that is not used filled with NaN.
    fn piece(&self, range: std::ops::Range<usize>, capacity: usize) -> (Vec<f16>, Vec<f16>) {
        let mut k = vec![f16::NAN; self.kv_heads * capacity * self.d];
        let mut v = k.clone();
        for (slot, token) in range.enumerate() {
            for kv_head in 0..self.kv_heads {
                let at = (kv_head * capacity + slot) * self.d;
                k[at..at + self.d].copy_from_slice(self.row(&self.k, token, kv_head));
                v[at..at + self.d].copy_from_slice(self.row(&self.v, token, kv_head));
            }
        }
        (k, v)
    }

    /// The tokens `range` as records of `group` tokens, `stride` bytes apart, from byte `offset` of the result.
    fn records(&self, range: std::ops::Range<usize>, group: usize, stride: usize, offset: usize) -> Vec<u8> {
        let mut bytes = vec![0xff; offset];
        for first in range.clone().step_by(group) {
            let (k, v) = self.piece(first..range.end.min(first + group), group);
            let start = bytes.len();
            bytes.extend(k.iter().chain(&v).flat_map(|x| x.to_le_bytes()));
            assert!(bytes.len() - start <= stride);
            bytes.resize(start + stride, 0xff);
        }
        bytes
    }
}

/// Attention of `q` to the sequence cut into pieces of the given (tokens, capacity).
fn attend_to(isa: Isa, threads: usize, sequence: &Sequence, cut: &[(usize, usize)], q: &[f32], scale: f32) -> Vec<f32> {
    let mut first = 0;
    let buffers: Vec<_> = cut
        .iter()
        .map(|&(tokens, capacity)| {
            first += tokens;
            (sequence.piece(first - tokens..first, capacity), tokens, capacity)
        })
        .collect();
    let pieces: Vec<_> = buffers
        .iter()
        .map(|((k, v), tokens, capacity)| KvPiece { k, v, capacity: *capacity, tokens: *tokens })
        .collect();
    let heads = q.len() / sequence.d;
    let mut scratch = AttentionScratch::new(heads, sequence.d, first, cut.len());
    let q = Guarded::with(q, 1, f32::NAN);
    let mut out = Guarded::new(heads * sequence.d, 3, 7.5);
    let pool = Pool::new(threads);
    attend(&pool, isa, q.get(), &pieces, sequence.kv_heads, sequence.d, scale, &mut scratch, out.get_mut());
    out.checked().to_vec()
}

fn check_decode(isa: Isa, sequence: &Sequence, cut: &[(usize, usize)], heads: usize, random: &mut Random) {
    let d = sequence.d;
    let q: Vec<f32> = random.f32s(heads * d).iter().map(|x| 3.0 * x).collect();
    let scale = 1.0 / (d as f32).sqrt();
    let found = attend_to(isa, 2, sequence, cut, &q, scale);
    let (expected, bounds) = sequence.naive(&q, sequence.tokens(), scale);
    let what = format!("{heads} heads of {d} over {cut:?}");
    assert_close(&found, &expected, |i| bounds[i / d], &what);
}

fn pieces_of_all_capacities(isa: Isa) {
    let mut random = Random::new(10);
    for capacity in (1..=16).chain([256]) {
        // Full pieces, an empty one, one that is not full.
        let rest = 1 + random.below(capacity);
        let cut = [
            (capacity, capacity),
            (0, capacity),
            (capacity, capacity),
            (rest, capacity),
            (0, 0),
            (capacity, capacity + 3),
        ];
        let tokens = cut.iter().map(|(tokens, _)| tokens).sum();
        let sequence = Sequence::new(&mut random, tokens, 2, 64);
        check_decode(isa, &sequence, &cut, 6, &mut random);
    }
}

fn head_dims_and_group_sizes(isa: Isa) {
    let mut random = Random::new(11);
    for d in [1, 7, 20, 64, 80, 96, 128, 256] {
        for group in [1, 2, 3, 4, 5, 7, 9] {
            let sequence = Sequence::new(&mut random, 31, 2, d);
            check_decode(isa, &sequence, &[(4, 4), (16, 16), (11, 16)], 2 * group, &mut random);
        }
    }
}

fn long_caches_are_partitioned(isa: Isa) {
    let mut random = Random::new(12);
    for tokens in [127, 128, 129, 132, 257, 530, 2048, 2049, 2600] {
        let sequence = Sequence::new(&mut random, tokens, 1, 16);
        check_decode(isa, &sequence, &[(tokens, tokens)], 3, &mut random);
        let mut cut = vec![(4, 4); tokens / 4];
        cut.push((tokens % 4, 4));
        check_decode(isa, &sequence, &cut, 3, &mut random);
    }
}

fn attention_does_not_depend_on_threads(isa: Isa) {
    let mut random = Random::new(13);
    let sequence = Sequence::new(&mut random, 700, 3, 64);
    let q = random.f32s(9 * 64);
    let cut = [(4, 4), (250, 256), (446, 512)];
    let one = attend_to(isa, 1, &sequence, &cut, &q, 0.125);
    for threads in [2, 7] {
        assert_eq!(attend_to(isa, threads, &sequence, &cut, &q, 0.125), one, "{threads} threads");
    }
}

fn attention_of_nothing_is_zero(isa: Isa) {
    let sequence = Sequence::new(&mut Random::new(14), 0, 1, 8);
    assert_eq!(attend_to(isa, 2, &sequence, &[], &[1.0; 16], 1.0), [0.0; 16]);
    assert_eq!(attend_to(isa, 2, &sequence, &[(0, 4)], &[1.0; 16], 1.0), [0.0; 16]);
}

fn not_a_number_stays_in_its_head(isa: Isa) {
    let mut random = Random::new(15);
    let (d, tokens) = (16, 300);
    for bad in [f16::NAN, f16::INFINITY] {
        let mut sequence = Sequence::new(&mut random, tokens, 2, d);
        let q = vec![1.0; 4 * d];
        sequence.k[(200 * 2 + 1) * d + 3] = bad;
        let out = attend_to(isa, 2, &sequence, &[(tokens, tokens)], &q, 1.0);
        assert!(out[..2 * d].iter().all(|x| x.is_finite()), "heads of the other KV head");
        assert!(out[2 * d..].iter().all(|x| x.is_nan()), "heads of this KV head");
    }
}

fn large_scores_do_not_overflow(isa: Isa) {
    let d = 8;
    let mut sequence = Sequence::new(&mut Random::new(16), 600, 1, d);
    sequence.k[300 * d..301 * d].fill(f16::from_f32(1000.0));
    for scale in [10.0, -10.0] {
        let q = vec![scale; d];
        let out = attend_to(isa, 2, &sequence, &[(600, 600)], &q, scale);
        let expected: Vec<f32> = sequence.row(&sequence.v, 300, 0).iter().map(|x| x.to_f32()).collect();
        assert_eq!(out, expected, "one key has all the weight");
    }
}

/// Prefill attention of queries at `positions` to the whole sequence, the keys given in blocks of these sizes.
struct Prefill<'a> {
    isa: Isa,
    threads: usize,
    sequence: &'a Sequence,
    group: usize,
    padding: usize,
    offset: usize,
    blocks: &'a [usize],
}

impl Prefill<'_> {
    fn run(&self, q: &[f32], first_position: usize, heads: usize, scale: f32) -> Vec<f32> {
        let (d, kv_heads) = (self.sequence.d, self.sequence.kv_heads);
        let queries = q.len() / (heads * d);
        let pool = Pool::new(self.threads);
        let mut attention = PrefillAttention::new(self.threads, heads, kv_heads, d, queries + 3);
        let mut out = Guarded::new(q.len(), 1, 7.5);
        // The state of an earlier chunk leaves no trace.
        for _ in 0..2 {
            attention.begin(queries);
            let mut first = 0;
            for &count in self.blocks {
                let stride = 4 * kv_heads * self.group * d + self.padding;
                let bytes = self.sequence.records(first..first + count, self.group, stride, self.offset);
                let kv = KvRecords {
                    bytes: &bytes[self.offset..],
                    stride,
                    group: self.group,
                    kv_heads,
                    d,
                    element: KvElement::F16,
                };
                attention.accumulate(&pool, self.isa, q, first_position, &kv, first, count, scale);
                first += count;
            }
            attention.finish(out.get_mut());
        }
        out.checked().to_vec()
    }

    fn check(&self, queries: usize, first_position: usize, heads: usize, random: &mut Random) {
        let d = self.sequence.d;
        let q: Vec<f32> = random.f32s(queries * heads * d).iter().map(|x| 3.0 * x).collect();
        let scale = 1.0 / (d as f32).sqrt();
        let found = self.run(&q, first_position, heads, scale);
        let tokens: usize = self.blocks.iter().sum();
        for (i, (q, found)) in q.chunks(heads * d).zip(found.chunks(heads * d)).enumerate() {
            let (expected, bounds) = self.sequence.naive(q, tokens.min(first_position + i + 1), scale);
            let what =
                format!("query {i} of {queries} from {first_position}, {heads} heads of {d}, blocks {:?}", self.blocks);
            assert_close(found, &expected, |i| bounds[i / d], &what);
        }
    }
}

fn prefill_equals_naive(isa: Isa) {
    let mut random = Random::new(20);
    for (d, kv_heads, ratio, queries) in [
        (64, 1, 3, 1),
        (64, 2, 1, 50),
        (64, 1, 7, 130),
        (80, 1, 3, 17),
        (96, 2, 3, 33),
        (128, 1, 2, 140),
        (256, 1, 1, 20),
        (7, 3, 5, 29),
        (16, 1, 50, 11),
        (1, 1, 1, 400),
    ] {
        let sequence = Sequence::new(&mut random, queries, kv_heads, d);
        let prefill =
            Prefill { isa, threads: 2, sequence: &sequence, group: 4, padding: 0, offset: 0, blocks: &[queries] };
        prefill.check(queries, 0, kv_heads * ratio, &mut random);
    }
}

fn prefill_in_chunks_equals_decode(isa: Isa) {
    let mut random = Random::new(21);
    let sequence = Sequence::new(&mut random, 420, 2, 64);
    for (group, blocks, queries) in [(4, &[300, 120][..], 120), (16, &[128, 128, 164][..], 164), (5, &[7, 413][..], 3)]
    {
        let prefill = Prefill { isa, threads: 2, sequence: &sequence, group, padding: 64, offset: 0, blocks };
        let first_position = 420 - queries;
        prefill.check(queries, first_position, 6, &mut random);
        // Against the other kernel, the last query of all.
        let q = random.f32s(queries * 6 * 64);
        let found = prefill.run(&q, first_position, 6, 0.2);
        let last = &q[(queries - 1) * 6 * 64..];
        let decoded: Vec<f64> =
            attend_to(isa, 1, &sequence, &[(420, 420)], last, 0.2).iter().map(|&x| f64::from(x)).collect();
        let (_, bounds) = sequence.naive(last, 420, 0.2);
        assert_close(&found[(queries - 1) * 6 * 64..], &decoded, |i| 2.0 * bounds[i / 64], "decode attention");
    }
    // Keys that all come after the queries change nothing.
    let prefill =
        Prefill { isa, threads: 2, sequence: &sequence, group: 4, padding: 0, offset: 0, blocks: &[100, 320] };
    prefill.check(30, 40, 6, &mut random);
}

fn prefill_does_not_depend_on_threads(isa: Isa) {
    let mut random = Random::new(22);
    let sequence = Sequence::new(&mut random, 500, 2, 32);
    let q = random.f32s(300 * 6 * 32);
    let run = |threads| {
        Prefill { isa, threads, sequence: &sequence, group: 4, padding: 0, offset: 0, blocks: &[200, 300] }
            .run(&q, 200, 6, 0.3)
    };
    let one = run(1);
    for threads in [2, 7] {
        assert_eq!(run(threads), one, "{threads} threads");
    }
}

fn prefill_of_unaligned_records(isa: Isa) {
    let mut random = Random::new(23);
    let sequence = Sequence::new(&mut random, 60, 2, 20);
    for offset in [1, 2, 3] {
        let prefill = Prefill { isa, threads: 2, sequence: &sequence, group: 4, padding: 17, offset, blocks: &[60] };
        prefill.check(60, 0, 4, &mut random);
    }
}

/// Whether `f` panics.
fn panics(f: impl FnOnce()) -> bool {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).is_err()
}

#[test]
fn wrong_shapes_are_refused() {
    let pool = Pool::new(1);
    let half = vec![f16::ZERO; 2 * 4 * 8];
    let (q, mut out) = (vec![0.0; 4 * 8], vec![0.0; 4 * 8]);
    let mut attend_piece = |capacity, tokens, k: &[f16]| {
        let mut scratch = AttentionScratch::new(4, 8, 4, 1);
        let piece = KvPiece { k, v: &half, capacity, tokens };
        panics(|| attend(&pool, Isa::Scalar, &q, &[piece], 2, 8, 1.0, &mut scratch, &mut out))
    };
    assert!(!attend_piece(4, 4, &half));
    assert!(attend_piece(4, 5, &half), "more tokens than room");
    assert!(attend_piece(4, 4, &half[1..]), "keys too short");
    assert!(attend_piece(usize::MAX / 2 + 5, 4, &half), "a product that wraps around");

    let bytes = vec![0; 2 * 4 * 2 * 2 * 8];
    let mut prefill = PrefillAttention::new(1, 4, 2, 8, 1);
    let mut accumulate = |stride, keys| {
        prefill.begin(1);
        let kv = KvRecords { bytes: &bytes, stride, group: 2, kv_heads: 2, d: 8, element: KvElement::F16 };
        panics(|| prefill.accumulate(&pool, Isa::Scalar, &q, 10, &kv, 0, keys, 1.0))
    };
    assert!(!accumulate(128, 4));
    assert!(accumulate(128, 5), "a third record");
    assert!(accumulate(129, 4), "a stride that leads outside");
    assert!(accumulate(usize::MAX, 4), "a sum that wraps around");
}
