//! Speed of the kernels around the KV cache on this machine: decode attention and sketch scoring in bytes per second beside a plain read of
//! as much memory, prefill attention in operations per second, selection and the small steps in microseconds.
//!
//! `cargo run --release -p forebay-kernels --example attention_speed -- [threads] [decode|prefill|sketch|small...]`
#![expect(clippy::print_stdout, reason = "a program that prints a table")]

use std::hint::black_box;
use std::time::Instant;

use forebay_kernels::attention::{AttentionScratch, KvPiece, attend};
use forebay_kernels::prefill_attention::{KvElement, KvRecords, PrefillAttention};
use forebay_kernels::select::{top_groups, top_groups_scratch};
use forebay_kernels::sketch::{ScoreScratch, SketchQueries, SketchRows, SketchType, group_scores};
use forebay_kernels::{Isa, Pool, covariance, dense, norm};
use half::f16;

/// Caches of one measurement together: several times the last-level cache, so that they come from memory.
const MEASURED_BYTES: usize = 128 << 20;
/// Each measurement is the best of this many.
const ROUNDS: usize = 25;

fn best_seconds(mut f: impl FnMut()) -> f64 {
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        f();
        best = best.min(start.elapsed().as_secs_f64());
    }
    best
}

/// Numbers without a pattern, in (-1, 1).
fn numbers(len: usize) -> Vec<f32> {
    let mut state = 1u32;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

fn halves(len: usize) -> Vec<f16> {
    numbers(len).into_iter().map(f16::from_f32).collect()
}

fn vector_isas() -> impl Iterator<Item = Isa> {
    Isa::available().into_iter().filter(|isa| *isa != Isa::Scalar)
}

fn read_speed(pool: &Pool) -> f64 {
    const CHUNK: usize = 64 << 10;
    let data = vec![1u8; MEASURED_BYTES];
    let seconds = best_seconds(|| {
        pool.for_each(data.len() / CHUNK, |_, task| {
            let lines = data[task * CHUNK..(task + 1) * CHUNK].chunks_exact(64);
            let mut sums = [0u64; 8];
            for line in lines {
                for (sum, word) in sums.iter_mut().zip(line.as_chunks().0) {
                    *sum ^= u64::from_le_bytes(*word);
                }
            }
            black_box(sums);
        });
    });
    data.len() as f64 / seconds
}

fn decode(pool: &Pool) {
    let read = read_speed(pool);
    println!("plain read: {:.1} GB/s", read / 1e9);
    println!(
        "{:>14} {:>4} {:>7} {:>6} {:>8} {:>9} {:>8} {:>10} {:>10}",
        "heads/kv", "d", "tokens", "piece", "isa", "GB/s", "of read", "us", "us cached"
    );
    for (heads, kv_heads, d) in [(9, 3, 64), (14, 2, 64), (32, 8, 128)] {
        for (tokens, capacity) in [(528, 4), (528, 16), (2048, 2048), (8192, 8192), (32_768, 32_768)] {
            let len = tokens * kv_heads * d;
            let copies = (MEASURED_BYTES / (4 * len)).max(1);
            let (k, v) = (halves(copies * len), halves(copies * len));
            let q = numbers(heads * d);
            let mut out = vec![0.0; heads * d];
            let pieces: Vec<Vec<KvPiece>> = (0..copies)
                .map(|copy| {
                    let piece = kv_heads * capacity * d;
                    let pieces = k[copy * len..][..len].chunks(piece).zip(v[copy * len..][..len].chunks(piece));
                    pieces.map(|(k, v)| KvPiece { k, v, capacity, tokens: capacity }).collect()
                })
                .collect();
            let mut scratch = AttentionScratch::new(heads, d, tokens, tokens / capacity);
            for isa in vector_isas() {
                let cached = best_seconds(|| {
                    attend(pool, isa, &q, &pieces[0], kv_heads, d, 0.125, &mut scratch, &mut out);
                });
                let seconds = best_seconds(|| {
                    for pieces in &pieces {
                        attend(pool, isa, &q, pieces, kv_heads, d, 0.125, &mut scratch, &mut out);
                    }
                });
                let speed = (4 * len * copies) as f64 / seconds;
                println!(
                    "{:>14} {d:>4} {tokens:>7} {capacity:>6} {:>8} {:>9.1} {:>7.0}% {:>10.1} {:>10.1}",
                    format!("{heads}/{kv_heads}"),
                    isa.name(),
                    speed / 1e9,
                    100.0 * speed / read,
                    seconds / copies as f64 * 1e6,
                    cached * 1e6
                );
            }
        }
    }
}

fn prefill(pool: &Pool) {
    println!("{:>9} {:>4} {:>8} {:>8} {:>8} {:>10} {:>9}", "heads/kv", "d", "queries", "keys", "isa", "ms", "GFLOP/s");
    for (heads, kv_heads, d) in [(9, 3, 64), (14, 2, 64), (32, 8, 128)] {
        for (queries, keys) in [(512, 512), (512, 4096), (8000, 8000)] {
            if heads * d > 2048 && keys > 4096 {
                continue;
            }
            let group = 4;
            let bytes: Vec<u8> = halves(2 * keys * kv_heads * d).iter().flat_map(|x| x.to_le_bytes()).collect();
            let kv = KvRecords {
                bytes: &bytes,
                stride: 4 * group * kv_heads * d,
                group,
                kv_heads,
                d,
                element: KvElement::F16,
            };
            let q = numbers(queries * heads * d);
            let mut out = vec![0.0; q.len()];
            let mut attention = PrefillAttention::new(pool.threads(), heads, kv_heads, d, queries);
            let first = keys - queries;
            let pairs = queries * first + queries * (queries + 1) / 2;
            for isa in vector_isas() {
                let mut run = || {
                    let start = Instant::now();
                    attention.begin(queries);
                    attention.accumulate(pool, isa, &q, first, &kv, 0, keys, 0.125);
                    attention.finish(&mut out);
                    start.elapsed().as_secs_f64()
                };
                let seconds =
                    (0..if pairs > 1 << 24 { 3 } else { ROUNDS }).map(|_| run()).fold(f64::INFINITY, f64::min);
                let speed = 4.0 * (pairs * heads * d) as f64 / seconds / 1e9;
                let shape = format!("{heads}/{kv_heads}");
                println!(
                    "{shape:>9} {d:>4} {queries:>8} {keys:>8} {:>8} {:>10.2} {speed:>9.1}",
                    isa.name(),
                    seconds * 1e3
                );
            }
        }
    }
}

fn sketch(pool: &Pool) {
    println!(
        "{:>5} {:>5} {:>7} {:>6} {:>8} {:>8} {:>10} {:>9} {:>10}",
        "type", "rank", "queries", "rows", "softmax", "isa", "us", "GB/s", "ns/row"
    );
    for (ty, rank, count, softmax) in [
        (SketchType::F16, 16, 1, false),
        (SketchType::I4, 48, 9, true),
        (SketchType::I4, 32, 14, true),
        (SketchType::I4, 64, 14, true),
        (SketchType::I8, 64, 14, true),
        (SketchType::F16, 64, 14, true),
        (SketchType::I4, 64, 2, true),
    ] {
        for n_rows in [2048, 8192, 32_768] {
            let mut rows = SketchRows::new(ty, rank, n_rows);
            for (row, values) in numbers(n_rows * rank).chunks(rank).enumerate() {
                rows.set(row, values);
            }
            let mut queries = SketchQueries::new(count, rank);
            let mut scratch = ScoreScratch::new(count, n_rows);
            let mut out = vec![0.0; n_rows / 4];
            for isa in vector_isas() {
                queries.set(isa, &numbers(count * rank), count, rank);
                let seconds = best_seconds(|| {
                    group_scores(pool, isa, &rows, n_rows, 4, &queries, softmax, None, &mut scratch, &mut out);
                });
                println!(
                    "{:>5} {rank:>5} {count:>7} {n_rows:>6} {softmax:>8} {:>8} {:>10.1} {:>9.2} {:>10.2}",
                    format!("{ty:?}"),
                    isa.name(),
                    seconds * 1e6,
                    rows.as_bytes().len() as f64 / seconds / 1e9,
                    seconds / n_rows as f64 * 1e9
                );
            }
        }
    }
}

fn small(pool: &Pool) {
    println!("{:>28} {:>8} {:>10}", "step", "isa", "us");
    let line = |step: &str, isa: Isa, seconds: f64| println!("{step:>28} {:>8} {:>10.2}", isa.name(), seconds * 1e6);
    for groups in [2048, 8192] {
        let scores = numbers(groups);
        let (mut scratch, mut out) = (Vec::with_capacity(top_groups_scratch(100)), Vec::with_capacity(100));
        let seconds = best_seconds(|| top_groups(&scores, 100, &mut scratch, &mut out));
        line(&format!("top 100 of {groups}"), Isa::Scalar, seconds);
    }
    for isa in vector_isas() {
        let x = numbers(576);
        let mut out = vec![0.0; 576];
        line("rms_norm 576", isa, best_seconds(|| norm::rms_norm(isa, &x, &x, 1e-5, &mut out)));
        let up = numbers(1536);
        let mut gate = numbers(1536);
        line("silu_mul 1536", isa, best_seconds(|| norm::silu_mul(isa, &mut gate, &up)));
        let a = halves(48 * 192);
        for n in [1, 4, 1000] {
            let x = numbers(n * 192);
            let mut out = vec![0.0; n * 48];
            line(&format!("project {n} x 192 to 48"), isa, best_seconds(|| dense::project(isa, &a, &x, 192, &mut out)));
        }
        let x = numbers(2048 * 192);
        let (mut sum, mut cov) = (vec![0.0; 192], vec![0.0; 192 * 192]);
        let seconds = best_seconds(|| covariance::covariance_add(pool, isa, &x, 192, 2048, &mut sum, &mut cov));
        line("covariance 2048 x 192", isa, seconds);
    }
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let threads = arguments.next().and_then(|text| text.parse().ok()).unwrap_or_else(Pool::default_threads);
    let wanted: Vec<String> = arguments.collect();
    let wants = |name: &str| wanted.is_empty() || wanted.iter().any(|wanted| wanted == name);
    let pool = Pool::new(threads);
    println!("{threads} threads, {} detected", Isa::best().name());
    if wants("decode") {
        decode(&pool);
    }
    if wants("prefill") {
        prefill(&pool);
    }
    if wants("sketch") {
        sketch(&pool);
    }
    if wants("small") {
        small(&pool);
    }
}
