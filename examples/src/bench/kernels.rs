//! `forebay-bench kernels`: each kernel beside the memory's read bandwidth, in one run.

use crate::bench::bandwidth::read_bandwidth;
use crate::bench::table::Table;
use crate::interrupt;
use crate::output::{write_json, write_text};
use crate::program::{Failure, Outcome};
use clap::Args;
use forebay_kernels::attention::{AttentionScratch, KvPiece, attend};
use forebay_kernels::sketch::{ScoreScratch, SketchQueries, SketchRows, SketchType, group_scores};
use forebay_kernels::{Activations, GemvJob, Isa, Pool, Precision, Weight, WeightType, gemv};
use half::f16;
use serde::Serialize;
use std::hint::black_box;
use std::time::Instant;

/// Options of `kernels`.
#[derive(Args)]
pub struct KernelsArgs {
    /// Threads that compute [default: one per physical core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: Option<u32>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// One kernel on one shape.
#[derive(Clone, Debug, Serialize)]
pub struct KernelRow {
    /// The kernel and its format.
    pub kernel: String,
    /// The shape.
    pub shape: String,
    /// Bytes that a call reads from memory.
    pub bytes: u64,
    /// Seconds of a call, the best of the rounds.
    pub seconds: f64,
    /// Bytes per second.
    pub bytes_per_second: f64,
    /// Share of the measured read bandwidth.
    pub of_bandwidth: f64,
}

#[derive(Serialize)]
struct KernelReport {
    threads: usize,
    isa: &'static str,
    read_bandwidth_bytes_per_second: f64,
    rows: Vec<KernelRow>,
}

/// Bytes of the operands of one call: far more than any cache, as weights and caches are in a decode step.
const OPERAND_BYTES: usize = 128 << 20;
/// Calls of which the fastest counts.
const ROUNDS: usize = 7;

/// The machine that kernels run on here.
struct Bench {
    pool: Pool,
    isa: Isa,
    bandwidth: f64,
}

impl Bench {
    fn row(&self, kernel: String, shape: String, bytes: usize, mut call: impl FnMut()) -> Outcome<KernelRow> {
        // The first call is not counted: it touches the operands' pages.
        call();
        let mut seconds = f64::INFINITY;
        for _ in 0..ROUNDS {
            interrupt::check()?;
            let start = Instant::now();
            call();
            seconds = seconds.min(start.elapsed().as_secs_f64());
        }
        let bytes_per_second = bytes as f64 / seconds;
        let of_bandwidth = bytes_per_second / self.bandwidth;
        Ok(KernelRow { kernel, shape, bytes: bytes as u64, seconds, bytes_per_second, of_bandwidth })
    }

    /// A weight product of one token, as large as [`OPERAND_BYTES`].
    fn weights(&self, dtype: WeightType, precision: Precision) -> Outcome<KernelRow> {
        const COLS: usize = 2048;
        let row_bytes = dtype.row_bytes(COLS).unwrap_or(COLS);
        let rows = OPERAND_BYTES / row_bytes;
        // Any bytes are valid weights; small ones keep the scales finite.
        let data: Vec<u8> = (0..rows * row_bytes).map(|i| (i * 31 % 59) as u8).collect();
        let weight = Weight::new(dtype, rows, COLS, &data).map_err(forebay::Error::from)?;
        let mut x = Activations::new(1, COLS);
        let values: Vec<f32> = (0..COLS).map(|i| (i % 17) as f32 / 8.0 - 1.0).collect();
        let mut out = vec![0.0; rows];
        let kernel = match precision {
            Precision::Exact => format!("weights {} f32", dtype.name()),
            Precision::Fast => format!("weights {}", dtype.name()),
        };
        self.row(kernel, format!("{rows} x {COLS}"), data.len(), || {
            x.set(self.isa, &values, 1, COLS, precision);
            gemv(&self.pool, self.isa, &x, &mut [GemvJob { weight, out: &mut out }]);
            black_box(&out);
        })
    }

    /// One layer's attention over a long cache in pieces of `group` tokens.
    fn attention(&self, heads: usize, kv_heads: usize, d: usize, group: usize) -> Outcome<KernelRow> {
        let token_bytes = 2 * kv_heads * d * size_of::<f16>();
        let pieces = OPERAND_BYTES / 2 / token_bytes / group;
        let tokens = pieces * group;
        let plane = kv_heads * group * d;
        let cache: Vec<f16> = (0..2 * tokens * kv_heads * d).map(|i| f16::from_f32((i % 13) as f32 / 16.0)).collect();
        let table: Vec<KvPiece> = cache
            .chunks_exact(2 * plane)
            .map(|record| KvPiece { k: &record[..plane], v: &record[plane..], capacity: group, tokens: group })
            .collect();
        let q: Vec<f32> = (0..heads * d).map(|i| (i % 7) as f32 / 8.0).collect();
        let mut out = vec![0.0; heads * d];
        let mut scratch = AttentionScratch::new(heads, d, tokens, table.len());
        let shape = format!("{heads}/{kv_heads} heads of {d}, {tokens} tokens in groups of {group}");
        self.row("attention f16".into(), shape, tokens * token_bytes, || {
            attend(&self.pool, self.isa, &q, &table, kv_heads, d, 0.125, &mut scratch, &mut out);
            black_box(&out);
        })
    }

    /// Scores of one layer's groups at `tokens` tokens, often enough to leave the caches.
    fn sketch(&self, ty: SketchType, rank: usize, queries: usize, softmax: bool) -> Outcome<KernelRow> {
        const TOKENS: usize = 32_768;
        const GROUP: usize = 4;
        let layer_bytes = ty.bytes(rank, TOKENS);
        let values: Vec<f32> = (0..rank).map(|i| (i % 9) as f32 / 8.0 - 0.5).collect();
        let mut layer = SketchRows::new(ty, rank, TOKENS);
        layer.set_all(&self.pool, 0..TOKENS, |_, out| {
            out.chunks_exact_mut(rank).for_each(|row| row.copy_from_slice(&values));
        });
        let layers = vec![layer; (OPERAND_BYTES / layer_bytes).max(1)];
        let q: Vec<f32> = (0..queries * rank).map(|i| (i % 11) as f32 / 64.0).collect();
        let mut prepared = SketchQueries::new(queries, rank);
        prepared.set(self.isa, &q, queries, rank);
        let mut scratch = ScoreScratch::new(queries, TOKENS);
        let mut out = vec![0.0; TOKENS / GROUP];
        let how = if softmax { "softmax" } else { "sum" };
        let shape = format!("{TOKENS} rows of rank {rank}, {queries} queries, {} layers", layers.len());
        self.row(format!("sketch {} {how}", sketch_name(ty)), shape, layers.len() * layer_bytes, || {
            for layer in &layers {
                group_scores(
                    &self.pool,
                    self.isa,
                    layer,
                    TOKENS,
                    GROUP,
                    &prepared,
                    softmax,
                    None,
                    &mut scratch,
                    &mut out,
                );
                black_box(&out);
            }
        })
    }
}

fn sketch_name(ty: SketchType) -> &'static str {
    match ty {
        SketchType::F16 => "f16",
        SketchType::I8 => "i8",
        SketchType::I4 => "i4",
    }
}

/// Measures and prints.
pub fn run(args: KernelsArgs) -> Outcome<()> {
    let threads = args.threads.map_or_else(Pool::default_threads, |n| n as usize);
    let bench = Bench { pool: Pool::new(threads), isa: Isa::best(), bandwidth: read_bandwidth(threads) };
    let mut rows = Vec::new();
    for dtype in WeightType::ALL {
        rows.push(bench.weights(dtype, Precision::Fast)?);
    }
    for dtype in [WeightType::Q4_1, WeightType::Q8_0] {
        rows.push(bench.weights(dtype, Precision::Exact)?);
    }
    for (heads, kv_heads, d) in [(9, 3, 64), (14, 2, 64), (32, 8, 128)] {
        for group in [4, 256] {
            rows.push(bench.attention(heads, kv_heads, d, group)?);
        }
    }
    for ty in [SketchType::F16, SketchType::I8, SketchType::I4] {
        rows.push(bench.sketch(ty, 48, 1, false)?);
        rows.push(bench.sketch(ty, 48, 3, true)?);
        rows.push(bench.sketch(ty, 48, 9, true)?);
    }
    if rows.iter().any(|r| !r.seconds.is_finite()) {
        return Err(Failure::Fault("a kernel took no measurable time".into()));
    }
    let report =
        KernelReport { threads, isa: bench.isa.name(), read_bandwidth_bytes_per_second: bench.bandwidth, rows };
    if args.json { write_json(&report) } else { print(&report) }
}

fn print(report: &KernelReport) -> Outcome<()> {
    let bandwidth = report.read_bandwidth_bytes_per_second / 1e9;
    write_text(&format!(
        "{} threads, {}, {bandwidth:.1} GB/s of measured memory reads\n\n",
        report.threads, report.isa
    ))?;
    let mut table = Table::new(2, &["kernel", "shape", "ms", "GB/s", "of read bandwidth"]);
    for r in &report.rows {
        table.push(vec![
            r.kernel.clone(),
            r.shape.clone(),
            format!("{:.2}", r.seconds * 1e3),
            format!("{:.1}", r.bytes_per_second / 1e9),
            format!("{:.2}", r.of_bandwidth),
        ]);
    }
    table.write()
}
