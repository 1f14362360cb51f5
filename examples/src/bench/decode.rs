//! `forebay-bench decode`: speed of decode by context, policy and disk class.

use crate::bench::bandwidth::read_bandwidth;
use crate::bench::synthetic::Synthetic;
use crate::bench::table::Table;
use crate::cli::{ComputeArgs, MemoryArgs, parse_disk, parse_policy};
use crate::generate::at_least_one;
use crate::input::read_text;
use crate::interrupt;
use crate::output::write_json;
use crate::program::{Failure, Outcome};
use crate::progress::PrefillBar;
use crate::size::format_size;
use clap::Args;
use forebay::config::Policy;
use forebay::model::Model;
use forebay::sampler::greedy;
use forebay::store::DiskClass;
use forebay::{Engine, KvMemory, Session, SessionStats};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use serde::Serialize;
use std::path::PathBuf;
use std::sync::Arc;

/// Options of `decode`.
#[derive(Args)]
#[command(group(clap::ArgGroup::new("weights").required(true)))]
pub struct DecodeArgs {
    /// Model file (GGUF)
    #[arg(long, value_name = "PATH", group = "weights")]
    model: Option<PathBuf>,
    /// A model of this shape with random Q4_0 weights, made in memory: for speed only
    #[arg(long, value_name = "SHAPE", group = "weights")]
    synthetic: Option<Synthetic>,
    #[command(flatten)]
    compute: ComputeArgs,
    #[command(flatten)]
    memory: MemoryArgs,
    /// Tokens of prefill, a row each
    #[arg(long, value_name = "N,..", value_delimiter = ',', required = true)]
    context: Vec<usize>,
    /// Policies: full, forebay, kvswap, load-all, window
    #[arg(long, value_name = "NAME,..", value_delimiter = ',', default_value = "full,forebay", value_parser = parse_policy)]
    policy: Vec<Policy>,
    /// Disk classes: native, or slowed down to nvme, ufs, emmc, sdcard
    #[arg(long, value_name = "CLASS,..", value_delimiter = ',', default_value = "native", value_parser = parse_disk)]
    disk: Vec<DiskClass>,
    /// Steps of a round
    #[arg(long, value_name = "N", default_value_t = 32)]
    steps: usize,
    /// Rounds, one after the other in the same session
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: usize,
    /// Text to read, repeated where it is shorter than the context; without it random tokens
    #[arg(long, value_name = "FILE", conflicts_with = "synthetic")]
    text: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// One row of the table.
#[derive(Clone, Debug, Serialize)]
pub struct DecodeRow {
    /// Tokens of prefill.
    pub context: usize,
    /// Policy of the cache.
    pub policy: &'static str,
    /// Disk class.
    pub disk: String,
    /// Steps per second of each round.
    pub rounds: Vec<f64>,
    /// The median of them.
    pub decode_tokens_per_second: f64,
    /// The best of them.
    pub decode_tokens_per_second_best: f64,
    /// Tokens per second of prefill.
    pub prefill_tokens_per_second: f64,
    /// KV-side memory.
    pub kv_memory_bytes: u64,
    /// A full f16 cache of the same tokens.
    pub kv_full_bytes: u64,
    /// Milliseconds per step in which decode stood still for reads.
    pub io_wait_ms_per_step: f64,
    /// Share of the reads' time that compute hid; null where nothing was read.
    pub hidden: Option<f64>,
    /// Share of selected groups that were in memory already.
    pub reuse_rate: f64,
    /// Bytes read per second of decode.
    pub read_bytes_per_second: f64,
    /// Reads per step.
    pub reads_per_step: f64,
    /// Steps per second that the memory's read bandwidth allows for the weights alone.
    pub weights_bound_tokens_per_second: f64,
}

#[derive(Serialize)]
struct DecodeReport {
    model: String,
    threads: usize,
    steps: usize,
    read_bandwidth_bytes_per_second: f64,
    weight_bytes_per_step: u64,
    rows: Vec<DecodeRow>,
}

/// Bytes of weights that a step reads: all but the rows of an embedding table that is not the output matrix, too.
pub fn weight_bytes_per_step(engine: &Engine) -> u64 {
    let model = engine.model();
    let all = model.weights_bytes() as u64;
    if model.config().tied_output { all } else { all - model.token_embedding().data().len() as u64 }
}

/// Measures and prints.
pub fn run(args: DecodeArgs) -> Outcome<()> {
    at_least_one("--steps", args.steps)?;
    at_least_one("--rounds", args.rounds)?;
    for &context in &args.context {
        at_least_one("--context", context)?;
    }
    let text = args.text.as_deref().map(read_text).transpose()?;
    let mut report = None;
    for &disk in &args.disk {
        let engine = open(&args, disk)?;
        let report = report.get_or_insert_with(|| new_report(&engine, args.steps));
        let words = match &text {
            Some(text) => engine.tokenizer().encode_with_bos(text, false)?,
            None => random_tokens(engine.model().config().vocab, args.context.iter().copied().max().unwrap_or(1)),
        };
        for &context in &args.context {
            let tokens: Vec<u32> = words.iter().copied().cycle().take(context).collect();
            for &policy in &args.policy {
                let mut row = measure(&engine, &args, &tokens, policy, disk)?;
                row.weights_bound_tokens_per_second =
                    report.read_bandwidth_bytes_per_second / report.weight_bytes_per_step as f64;
                report.rows.push(row);
            }
        }
    }
    let Some(report) = report else { return Err(Failure::usage("--disks", "none, expected a disk class")) };
    if args.json { write_json(&report) } else { print(&report) }
}

fn open(args: &DecodeArgs, disk: DiskClass) -> Outcome<Arc<Engine>> {
    let model = match (&args.model, args.synthetic) {
        (Some(path), _) => Model::open(path).map_err(forebay::Error::from)?,
        (None, Some(shape)) => shape.model()?,
        (None, None) => return Err(Failure::usage("--model", "missing, expected a model file or --synthetic")),
    };
    Ok(Engine::from_model(model, args.compute.options(disk)?)?)
}

/// The same tokens each time.
fn random_tokens(vocab: usize, count: usize) -> Vec<u32> {
    let mut random = ChaCha8Rng::seed_from_u64(0);
    (0..count).map(|_| (random.next_u64() % vocab as u64) as u32).collect()
}

fn new_report(engine: &Engine, steps: usize) -> DecodeReport {
    let threads = engine.transformer().pool().threads();
    DecodeReport {
        model: engine.model().config().name.clone(),
        threads,
        steps,
        read_bandwidth_bytes_per_second: read_bandwidth(threads),
        weight_bytes_per_step: weight_bytes_per_step(engine),
        rows: Vec::new(),
    }
}

fn measure(
    engine: &Arc<Engine>,
    args: &DecodeArgs,
    tokens: &[u32],
    policy: Policy,
    disk: DiskClass,
) -> Outcome<DecodeRow> {
    let capacity = tokens.len() + args.steps * args.rounds;
    let mut options = args.memory.session(capacity, policy);
    if policy == Policy::Full {
        // It has one size, whatever the others are given; nor does it have settings.
        (options.kv_memory, options.overrides) = (KvMemory::Full, String::new());
    }
    let mut session = engine.session(&options)?;
    interrupt::watch(session.cancel_handle());
    let mut bar = PrefillBar::new(&format!("{} tokens, {}", tokens.len(), policy.name()));
    session.prefill(tokens, &mut |progress| bar.update(progress))?;
    drop(bar);
    let before = session.stats();
    let mut rounds = Vec::with_capacity(args.rounds);
    for _ in 0..args.rounds {
        rounds.push(round(&mut session, args.steps)?);
    }
    let after = session.stats();
    Ok(row(tokens.len(), session.policy(), disk, rounds, &before, &after))
}

/// Steps per second of `steps` greedy steps.
fn round(session: &mut Session, steps: usize) -> Outcome<f64> {
    let before = session.stats().decode_seconds;
    for _ in 0..steps {
        interrupt::check()?;
        let token = greedy(session.logits()).ok_or_else(|| Failure::Fault("no finite logit".into()))?;
        session.step(token)?;
    }
    Ok(steps as f64 / (session.stats().decode_seconds - before))
}

fn row(
    context: usize,
    policy: Policy,
    disk: DiskClass,
    rounds: Vec<f64>,
    before: &SessionStats,
    after: &SessionStats,
) -> DecodeRow {
    let steps = (after.steps - before.steps) as f64;
    let seconds = after.decode_seconds - before.decode_seconds;
    let (wait, busy) = (after.io_wait_seconds - before.io_wait_seconds, after.io_busy_seconds - before.io_busy_seconds);
    let selected = after.groups_selected - before.groups_selected;
    let reused = after.groups_reused - before.groups_reused;
    let mut sorted = rounds.clone();
    sorted.sort_by(f64::total_cmp);
    DecodeRow {
        context,
        policy: policy.name(),
        disk: disk.to_string(),
        decode_tokens_per_second: sorted[sorted.len() / 2],
        decode_tokens_per_second_best: sorted[sorted.len() - 1],
        rounds,
        prefill_tokens_per_second: before.prompt_tokens as f64 / before.prefill_seconds,
        kv_memory_bytes: after.kv_memory_bytes,
        kv_full_bytes: after.kv_full_bytes,
        io_wait_ms_per_step: wait * 1e3 / steps,
        hidden: (busy > 0.0).then(|| (1.0 - wait / busy).clamp(0.0, 1.0)),
        reuse_rate: if selected > 0 { reused as f64 / selected as f64 } else { 0.0 },
        read_bytes_per_second: (after.disk_bytes_read - before.disk_bytes_read) as f64 / seconds,
        reads_per_step: (after.disk_reads - before.disk_reads) as f64 / steps,
        weights_bound_tokens_per_second: 0.0,
    }
}

fn print(report: &DecodeReport) -> Outcome<()> {
    let bandwidth = report.read_bandwidth_bytes_per_second;
    crate::output::write_text(&format!(
        "{}, {} threads, {} steps a round; {} of weights a step at {:.1} GB/s of measured memory reads allow {:.1} tok/s\n\n",
        report.model,
        report.threads,
        report.steps,
        format_size(report.weight_bytes_per_step),
        bandwidth / 1e9,
        bandwidth / report.weight_bytes_per_step as f64,
    ))?;
    let mut table = Table::new(
        3,
        &[
            "context",
            "policy",
            "disk",
            "tok/s",
            "best",
            "of bound",
            "prefill tok/s",
            "KV memory",
            "of full",
            "wait ms/step",
            "hidden",
            "reuse",
            "read MB/s",
            "reads/step",
        ],
    );
    for r in &report.rows {
        table.push(vec![
            r.context.to_string(),
            r.policy.to_string(),
            r.disk.clone(),
            format!("{:.1}", r.decode_tokens_per_second),
            format!("{:.1}", r.decode_tokens_per_second_best),
            format!("{:.2}", r.decode_tokens_per_second / r.weights_bound_tokens_per_second),
            format!("{:.1}", r.prefill_tokens_per_second),
            format_size(r.kv_memory_bytes),
            format!("1/{:.1}", r.kv_full_bytes as f64 / r.kv_memory_bytes as f64),
            format!("{:.2}", r.io_wait_ms_per_step),
            r.hidden.map_or("-".into(), |h| format!("{h:.2}")),
            format!("{:.2}", r.reuse_rate),
            format!("{:.1}", r.read_bytes_per_second / 1e6),
            format!("{:.1}", r.reads_per_step),
        ]);
    }
    table.write()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_counts_only_what_happened_in_the_rounds() {
        let before = SessionStats { steps: 2, prompt_tokens: 100, prefill_seconds: 2.0, ..SessionStats::default() };
        let after = SessionStats {
            steps: 12,
            decode_seconds: 2.0,
            disk_bytes_read: 4_000_000,
            disk_reads: 50,
            groups_selected: 8,
            groups_reused: 6,
            io_wait_seconds: 0.1,
            io_busy_seconds: 0.4,
            ..before.clone()
        };
        let r = row(100, Policy::Forebay, DiskClass::Native, vec![3.0, 1.0, 2.0], &before, &after);
        assert_eq!((r.decode_tokens_per_second, r.decode_tokens_per_second_best), (2.0, 3.0));
        assert_eq!((r.prefill_tokens_per_second, r.reuse_rate, r.reads_per_step), (50.0, 0.75, 5.0));
        assert!((r.hidden.unwrap() - 0.75).abs() < 1e-12 && (r.io_wait_ms_per_step - 10.0).abs() < 1e-9);
        assert_eq!(r.read_bytes_per_second, 2e6);
    }
}
