//! Speed of the weight products on this machine: bytes per second of the decode product beside a plain read of as much memory, from
//! memory (`gemv`) and from the cache (`cached`), and operations per second of the prefill product.
//!
//! `cargo run --release -p forebay-kernels --example weight_speed -- [threads] [pool|gemv|cached|step|gemm] [types...]`
#![expect(clippy::print_stdout, reason = "a program that prints a table")]

use forebay_kernels::{Activations, GemmScratch, GemvJob, Isa, Pool, Precision, Weight, WeightType, gemm, gemv};
use std::hint::black_box;
use std::time::Instant;

/// Weights of one measurement: several times the last-level cache, so that they come from memory.
const MEASURED_BYTES: usize = 96 << 20;
/// Each measurement is the best of this many.
const ROUNDS: usize = 15;

fn best_seconds(mut f: impl FnMut()) -> f64 {
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        f();
        best = best.min(start.elapsed().as_secs_f64());
    }
    best
}

/// Bytes without a pattern, whose f16 scales are small finite numbers.
fn weights(dtype: WeightType, bytes: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut data = Vec::with_capacity(bytes + 8);
    while data.len() < bytes {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        data.extend_from_slice(&(state & 0x3fff_3fff_3fff_3fff).to_le_bytes());
    }
    data.truncate(bytes / dtype.block_bytes() * dtype.block_bytes());
    data
}

fn read_speed(pool: &Pool, data: &[u8]) -> f64 {
    const CHUNK: usize = 64 << 10;
    let seconds = best_seconds(|| {
        pool.for_each(data.len() / CHUNK, |_, task| {
            let words = data[task * CHUNK..(task + 1) * CHUNK].chunks_exact(64);
            let mut sums = [0u64; 8];
            for line in words {
                for (sum, word) in sums.iter_mut().zip(line.as_chunks().0) {
                    *sum ^= u64::from_le_bytes(*word);
                }
            }
            black_box(sums);
        });
    });
    (data.len() / CHUNK * CHUNK) as f64 / seconds
}

fn decode_products(pool: &Pool, measured_bytes: usize, types: &[WeightType]) {
    let plain = vec![1u8; measured_bytes.max(1 << 20)];
    let read = read_speed(pool, &plain);
    println!("plain read: {:.1} GB/s", read / 1e9);
    println!("{:6} {:>11} {:>8} {:>9} {:>8} {:>9}", "type", "rows x cols", "isa", "GB/s", "of read", "GB/s n=4");
    for (rows, cols) in [(576, 576), (1536, 576), (576, 1536), (4864, 896)] {
        for &dtype in types {
            let Some(row_bytes) = dtype.row_bytes(cols) else { continue };
            let bytes = rows * row_bytes;
            let count = (measured_bytes / bytes).max(1);
            let data = weights(dtype, count * bytes);
            for isa in Isa::available().into_iter().filter(|isa| *isa != Isa::Scalar) {
                let mut speeds = [0.0; 2];
                for (n, speed) in [1, 4].into_iter().zip(&mut speeds) {
                    let input: Vec<f32> = (0..n * cols).map(|i| (i % 17) as f32 - 8.0).collect();
                    let mut x = Activations::new(n, cols);
                    let mut out = vec![0.0; n * rows];
                    let seconds = best_seconds(|| {
                        for matrix in data.chunks_exact(bytes) {
                            x.set(isa, &input, n, cols, Precision::Fast);
                            let weight =
                                Weight::new(dtype, rows, cols, matrix).expect("the length is that of the shape");
                            gemv(pool, isa, &x, &mut [GemvJob { weight, out: &mut out }]);
                        }
                    });
                    *speed = data.len() as f64 / seconds;
                }
                println!(
                    "{:6} {:>11} {:>8} {:>9.1} {:>7.0}% {:>9.1}",
                    dtype.name(),
                    format!("{rows} x {cols}"),
                    isa.name(),
                    speeds[0] / 1e9,
                    100.0 * speeds[0] / read,
                    speeds[1] / 1e9,
                );
            }
        }
    }
}

/// One token's weight products in the shapes and types of a 135M-parameter Llama: 30 layers in Q4_1 and an output in Q8_0.
fn decode_step(pool: &Pool) {
    const DIM: usize = 576;
    const LAYERS: [(&[usize], usize); 4] =
        [(&[DIM, 192, 192], DIM), (&[DIM], DIM), (&[1536, 1536], DIM), (&[DIM], 1536)];
    const VOCABULARY: usize = 49_152;
    let mut products: Vec<(WeightType, &[usize], usize)> = Vec::new();
    for _ in 0..30 {
        products.extend(LAYERS.iter().map(|&(rows, cols)| (WeightType::Q4_1, rows, cols)));
    }
    products.push((WeightType::Q8_0, &[VOCABULARY], DIM));
    let data: Vec<Vec<Vec<u8>>> = products
        .iter()
        .map(|&(dtype, rows, cols)| {
            rows.iter().map(|&rows| weights(dtype, rows * dtype.row_bytes(cols).expect("whole blocks"))).collect()
        })
        .collect();
    let bytes: usize = data.iter().flatten().map(Vec::len).sum();
    let input = vec![0.5; 1536];
    let mut out = vec![0.0; VOCABULARY];
    let plain = vec![1u8; bytes];
    println!("{:>8} {:>8} {:>9} {:>8}", "isa", "ms", "GB/s", "of read");
    for isa in Isa::available().into_iter().filter(|isa| *isa != Isa::Scalar) {
        let mut x = Activations::new(1, 1536);
        let read = read_speed(pool, &plain);
        let seconds = best_seconds(|| {
            for (&(dtype, rows, cols), data) in products.iter().zip(&data) {
                x.set(isa, &input[..cols], 1, cols, Precision::Fast);
                let mut rest = &mut out[..];
                let mut jobs: Vec<GemvJob> = Vec::with_capacity(rows.len());
                for (&rows, data) in rows.iter().zip(data) {
                    let (out, others) = rest.split_at_mut(rows);
                    rest = others;
                    let weight = Weight::new(dtype, rows, cols, data).expect("the length is that of the shape");
                    jobs.push(GemvJob { weight, out });
                }
                gemv(pool, isa, &x, &mut jobs);
            }
        });
        let speed = bytes as f64 / seconds;
        println!("{:>8} {:>8.2} {:>9.1} {:>7.0}%", isa.name(), seconds * 1e3, speed / 1e9, 100.0 * speed / read);
    }
}

fn prefill_products(pool: &Pool) {
    println!("{:6} {:>11} {:>6} {:>8} {:>9}", "type", "rows x cols", "tokens", "isa", "GFLOP/s");
    for dtype in [WeightType::Q4_1, WeightType::F16] {
        for (rows, cols) in [(576, 576), (192, 576), (1536, 576), (576, 1536)] {
            let data = weights(dtype, rows * dtype.row_bytes(cols).expect("whole blocks"));
            let weight = Weight::new(dtype, rows, cols, &data).expect("the length is that of the shape");
            let mut scratch = GemmScratch::new(pool.threads(), cols);
            for tokens in [64, 256, 1024] {
                let x: Vec<f32> = (0..tokens * cols).map(|i| (i % 17) as f32 - 8.0).collect();
                let mut out = vec![0.0; tokens * rows];
                for isa in Isa::available().into_iter().filter(|isa| *isa != Isa::Scalar) {
                    let seconds = best_seconds(|| gemm(pool, isa, &weight, &x, &mut out, false, &mut scratch));
                    let speed = 2.0 * (rows * cols * tokens) as f64 / seconds / 1e9;
                    let shape = format!("{rows} x {cols}");
                    println!("{:6} {shape:>11} {tokens:>6} {:>8} {speed:>9.1}", dtype.name(), isa.name());
                }
            }
        }
    }
}

fn fork_join(pool: &Pool) {
    const JOINS: usize = 20_000;
    let seconds = best_seconds(|| (0..JOINS).for_each(|_| pool.run(|worker| _ = black_box(worker))));
    println!("fork-join: {:.2} us", seconds / JOINS as f64 * 1e6);
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let threads = arguments.next().and_then(|text| text.parse().ok()).unwrap_or_else(Pool::default_threads);
    let what = arguments.next();
    let wanted = |name: &str| what.as_deref().is_none_or(|what| what == name);
    let names: Vec<String> = arguments.collect();
    let types: Vec<WeightType> = WeightType::ALL
        .into_iter()
        .filter(|dtype| names.is_empty() || names.iter().any(|name| name == dtype.name()))
        .collect();
    let pool = Pool::new(threads);
    println!("{threads} threads, {} detected", Isa::best().name());
    if wanted("pool") {
        fork_join(&pool);
    }
    if wanted("gemv") {
        decode_products(&pool, MEASURED_BYTES, &types);
    }
    if wanted("cached") {
        decode_products(&pool, 0, &types);
    }
    if wanted("step") {
        decode_step(&pool);
    }
    if wanted("gemm") {
        prefill_products(&pool);
    }
}
