//! `forebay-tune`: measures cache policies against the full cache.

use clap::{Args, Parser, Subcommand};
use forebay::config::Policy;
use forebay::store::DiskClass;
use forebay::{CancelHandle, Engine, Error, Progress};
use forebay_examples::bench::table::Table;
use forebay_examples::cli::{EngineArgs, MemoryArgs, parse_disk, parse_policy, warn_past_training};
use forebay_examples::generate::at_least_one;
use forebay_examples::progress::PrefillBar;
use forebay_examples::report::config_names;
use forebay_examples::size::format_size;
use forebay_examples::{Failure, Outcome, input, interrupt, output, program};
use forebay_tuner::evaluate::{self, PolicyReport, Reference, Watch, tokens_needed};
use forebay_tuner::needle::{self, Answer, Asked, Case, NeedleReport};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

/// Measure what a cache policy costs in quality.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Teacher-forced steps over a text: divergence from the full cache, agreement, likelihood
    Evaluate(Box<EvaluateArgs>),
    /// Retrieval of a number hidden in a long text
    Needle(Box<NeedleArgs>),
}

/// What both measurements need.
#[derive(Args)]
struct CommonArgs {
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    memory: MemoryArgs,
    /// Policies to measure: full, forebay, kvswap, load-all, window
    #[arg(long, value_name = "NAME,..", value_delimiter = ',', default_value = "forebay", value_parser = parse_policy)]
    policy: Vec<Policy>,
    /// Slow the store down to a class of device: native, nvme, ufs, emmc, sdcard
    #[arg(long, value_name = "CLASS", default_value = "native", value_parser = parse_disk)]
    disk: DiskClass,
    /// Tokens of prefill
    #[arg(long, value_name = "N")]
    context: usize,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct EvaluateArgs {
    #[command(flatten)]
    common: CommonArgs,
    /// Text to step over; several are averaged
    #[arg(long, value_name = "FILE", required = true)]
    text: Vec<PathBuf>,
    /// Tokens of the text to skip
    #[arg(long, value_name = "TOKENS", default_value_t = 0)]
    offset: usize,
    /// Steps after the prefill
    #[arg(long, value_name = "N", default_value_t = 128)]
    steps: usize,
}

#[derive(Args)]
struct NeedleArgs {
    #[command(flatten)]
    common: CommonArgs,
    /// Text that the number is hidden in
    #[arg(long, value_name = "FILE")]
    haystack: PathBuf,
    /// Where it is hidden: 0 is the start of the text, 1 its end
    #[arg(long, value_name = "SHARE,..", value_delimiter = ',', default_value = "0.1,0.3,0.5,0.7,0.9", value_parser = parse_depth)]
    depths: Vec<f64>,
    /// Numbers hidden at each depth
    #[arg(long, value_name = "N", default_value_t = 1)]
    cases: usize,
    /// Seed of the numbers
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
}

fn main() -> ExitCode {
    program::run(measure)
}

fn measure(args: Arguments) -> Outcome<()> {
    match args.what {
        What::Evaluate(args) => evaluate(&args),
        What::Needle(args) => needle(&args),
    }
}

fn parse_depth(text: &str) -> Result<f64, String> {
    let depth = text.trim().parse::<f64>().ok().filter(|d| (0.0..=1.0).contains(d));
    depth.ok_or_else(|| "expected a share from 0 to 1".into())
}

/// Runs `work` with a progress bar and with Ctrl-C connected.
fn watched<T>(label: &str, work: impl FnOnce(&mut Watch) -> forebay::Result<T>) -> Outcome<T> {
    let mut bar = PrefillBar::new(label);
    let mut session = |handle: CancelHandle| interrupt::watch(handle);
    let mut progress = |p: Progress| bar.update(p);
    Ok(work(&mut Watch { session: &mut session, progress: &mut progress })?)
}

impl CommonArgs {
    fn open(&self) -> Outcome<Arc<Engine>> {
        at_least_one("--context", self.context)?;
        let engine = self.engine.open(self.disk)?;
        warn_past_training(self.context, engine.model().config().context);
        Ok(engine)
    }
}

fn evaluate(args: &EvaluateArgs) -> Outcome<()> {
    at_least_one("--steps", args.steps)?;
    let common = &args.common;
    let texts = args.text.iter().map(|path| input::read_text(path)).collect::<Outcome<Vec<_>>>()?;
    let engine = common.open()?;
    let context = common.context;
    let options = |policy| common.memory.session(context + args.steps, policy);
    // What cannot be made is said before the first long prefill.
    for &policy in &common.policy {
        engine.plan(&options(policy))?;
    }
    let mut full = Vec::with_capacity(texts.len());
    let mut compared: Vec<Vec<_>> = common.policy.iter().map(|_| Vec::with_capacity(texts.len())).collect();
    for (path, text) in args.text.iter().zip(&texts) {
        let name = path.display().to_string();
        let tokens = engine.tokenizer().encode_with_bos(text, false)?;
        let (have, need) = (tokens.len(), tokens_needed(context, args.steps).saturating_add(args.offset));
        if have < need {
            return Err(Failure::usage(
                name,
                format!("has {have} tokens, expected at least {need} (offset + context + steps + 1)"),
            ));
        }
        let tokens = &tokens[args.offset..];
        let reference = watched("full", |watch| Reference::new(&engine, tokens, context, args.steps, watch))?;
        for (&policy, compared) in common.policy.iter().zip(&mut compared) {
            let one = watched(policy.name(), |watch| reference.compare(&engine, &options(policy), watch))?;
            compared.push((name.clone(), one));
        }
        full.push(reference.stats);
    }
    let full: Vec<_> = full.iter().collect();
    let reports: Vec<PolicyReport> = compared.iter().filter_map(|c| evaluate::report(c, &full)).collect();
    if common.json {
        let extra = json!({"context": context, "offset": args.offset, "config": config_names(&engine).0});
        return write_reports(&reports, &extra);
    }
    print_evaluation(&reports)
}

fn needle(args: &NeedleArgs) -> Outcome<()> {
    at_least_one("--cases", args.cases)?;
    let common = &args.common;
    let haystack = input::read_text(&args.haystack)?;
    let engine = common.open()?;
    let options = |policy| common.memory.session(common.context + needle::ANSWER_TOKENS, policy);
    let mut settings = Vec::with_capacity(common.policy.len());
    for &policy in &common.policy {
        let (config, _) = engine.plan(&options(policy))?;
        settings.push(serde_json::to_value(config).unwrap_or(Value::Null));
    }
    let cases = make_cases(&engine, args, &haystack)?;
    let mut full = Vec::with_capacity(cases.len());
    let mut answers: Vec<Vec<Answer>> = common.policy.iter().map(|_| Vec::with_capacity(cases.len())).collect();
    for case in &cases {
        // The reference is exact whatever memory the policies get.
        let exact = forebay::SessionOptions {
            policy: Policy::Full,
            ..forebay::SessionOptions::new(common.context + needle::ANSWER_TOKENS)
        };
        let reference = watched("full", |watch| needle::ask(&engine, case, &exact, watch))?;
        for (&policy, answers) in common.policy.iter().zip(&mut answers) {
            answers.push(match policy {
                Policy::Full => reference.clone(),
                _ => watched(policy.name(), |watch| needle::ask(&engine, case, &options(policy), watch))?,
            });
        }
        full.push(reference);
    }
    let report = |(index, answers): (usize, &Vec<Answer>)| {
        let pairs = cases.iter().zip(&full).zip(answers);
        let asked: Vec<_> = pairs.map(|((case, full), answer)| Asked { case, full, answer }).collect();
        needle::report(common.policy[index].name(), settings[index].clone(), &asked)
    };
    let reports: Vec<NeedleReport> = answers.iter().enumerate().filter_map(report).collect();
    if common.json {
        let extra = json!({"context": common.context, "seed": args.seed, "config": config_names(&engine).0});
        return write_reports(&reports, &extra);
    }
    print_needle(&reports)
}

fn make_cases(engine: &Engine, args: &NeedleArgs, haystack: &str) -> Outcome<Vec<Case>> {
    let mut cases = Vec::with_capacity(args.depths.len() * args.cases);
    for &depth in &args.depths {
        for _ in 0..args.cases {
            let number = needle::magic_number(args.seed, cases.len() as u64);
            let case = needle::case(engine, haystack, args.common.context, depth, &number).map_err(|e| match e {
                Error::Argument { .. } => Failure::usage(args.haystack.display(), e),
                e => e.into(),
            })?;
            cases.push(case);
        }
    }
    Ok(cases)
}

/// One object for one policy; an object with an array `results` for several. `extra` fields go into the object.
fn write_reports(reports: &[impl serde::Serialize], extra: &Value) -> Outcome<()> {
    let fault = |e: serde_json::Error| Failure::Fault(format!("--json: {e}"));
    let mut object = match reports {
        [one] => serde_json::to_value(one).map_err(fault)?,
        several => json!({"results": serde_json::to_value(several).map_err(fault)?}),
    };
    if let (Some(object), Some(extra)) = (object.as_object_mut(), extra.as_object()) {
        object.extend(extra.clone());
    }
    output::write_json(&object)
}

fn share(part: u64, whole: u64) -> String {
    if part == 0 { "-".into() } else { format!("1/{:.1}", whole as f64 / part as f64) }
}

fn print_evaluation(reports: &[PolicyReport]) -> Outcome<()> {
    let titles = [
        "policy",
        "text",
        "KL",
        "agreement",
        "nll",
        "nll full",
        "KV memory",
        "of full",
        "reuse",
        "tok/s",
        "full tok/s",
    ];
    let mut table = Table::new(2, &titles);
    for r in reports {
        table.push(vec![
            r.policy.to_string(),
            if r.texts.is_empty() { String::new() } else { "all".into() },
            format!("{:.4} ± {:.4}", r.kl, r.kl_standard_error),
            format!("{:.3} ± {:.3}", r.agreement, r.agreement_standard_error),
            format!("{:.4}", r.nll),
            format!("{:.4}", r.nll_full),
            format_size(r.kv_memory_bytes),
            share(r.kv_memory_bytes, r.kv_full_bytes),
            format!("{:.2}", r.reuse_rate),
            format!("{:.1}", r.decode_tokens_per_second),
            format!("{:.1}", r.decode_tokens_per_second_full),
        ]);
        for t in &r.texts {
            let mut row = vec![String::new(); titles.len()];
            row[..6].clone_from_slice(&[
                r.policy.to_string(),
                t.text.clone(),
                format!("{:.4} ± {:.4}", t.kl, t.kl_standard_error),
                format!("{:.3}", t.agreement),
                format!("{:.4}", t.nll),
                format!("{:.4}", t.nll_full),
            ]);
            row[8] = format!("{:.2}", t.reuse_rate);
            table.push(row);
        }
    }
    table.write()
}

fn print_needle(reports: &[NeedleReport]) -> Outcome<()> {
    let mut table = Table::new(1, &["policy", "depth", "cases", "right", "right with full", "KV memory", "of full"]);
    for r in reports {
        for d in &r.depths {
            let (depth, cases) = (format!("{:.2}", d.depth), d.cases.to_string());
            let right = [d.correct.to_string(), d.correct_full.to_string()];
            let row = [r.policy.to_string(), depth, cases].into_iter().chain(right);
            table.push(row.chain([String::new(), String::new()]).collect());
        }
        table.push(vec![
            r.policy.to_string(),
            "all".into(),
            r.cases.to_string(),
            r.correct.to_string(),
            r.correct_full.to_string(),
            format_size(r.kv_memory_bytes),
            share(r.kv_memory_bytes, r.kv_full_bytes),
        ]);
    }
    table.write()
}
