//! `forebay-summarize`: a summary of one or more text documents.

use clap::Parser;
use forebay::config::Policy;
use forebay::store::DiskClass;
use forebay_examples::cli::{EngineArgs, MemoryArgs, SamplingArgs, parse_disk, parse_policy, warn_past_training};
use forebay_examples::generate::{GenerateOptions, at_least_one};
use forebay_examples::report::Report;
use forebay_examples::summarize::{Summarizer, default_instruction, tokens_for_words};
use forebay_examples::{Outcome, input, output, program};
use std::path::PathBuf;
use std::process::ExitCode;

/// Summarize documents, with the KV cache on disk.
#[derive(Parser)]
#[command(version)]
struct Args {
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    memory: MemoryArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// Text documents, UTF-8; - is standard input
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// Ask for at most this many words
    #[arg(long, value_name = "N")]
    max_words: Option<usize>,
    /// What to ask of the model, in place of a plain summary
    #[arg(long, value_name = "TEXT")]
    instruction: Option<String>,
    /// Most tokens to generate [default: what --max-words needs, else 320]
    #[arg(long, value_name = "N")]
    max_new_tokens: Option<usize>,
    /// Tokens that text and summary may take together; a longer text is summarised in parts [default: the model's context]
    #[arg(long, value_name = "N")]
    context: Option<usize>,
    /// How the KV cache is kept: full, forebay, kvswap, load-all, window
    #[arg(long, value_name = "NAME", default_value = "forebay", value_parser = parse_policy)]
    policy: Policy,
    /// Slow the store down to a class of device: native, nvme, ufs, emmc, sdcard
    #[arg(long, value_name = "CLASS", default_value = "native", value_parser = parse_disk)]
    disk: DiskClass,
    /// Go on when the model says that the text ends
    #[arg(long)]
    ignore_eos: bool,
    /// Print one JSON object instead of the text
    #[arg(long)]
    json: bool,
    /// Write the JSON object to a file, whatever is printed
    #[arg(long, value_name = "FILE")]
    stats: Option<PathBuf>,
}

/// Tokens of a summary where nothing is said about its length.
const DEFAULT_NEW_TOKENS: usize = 320;

/// Keeps small models from saying the same sentence over and over under greedy decoding, and leaves names alone.
const DEFAULT_REPEAT_PENALTY: f32 = 1.15;

fn main() -> ExitCode {
    program::run(summarize)
}

fn summarize(args: Args) -> Outcome<()> {
    if let Some(words) = args.max_words {
        at_least_one("--max-words", words)?;
    }
    let new_tokens = args.max_new_tokens.or(args.max_words.map(tokens_for_words)).unwrap_or(DEFAULT_NEW_TOKENS);
    at_least_one("--max-new-tokens", new_tokens)?;
    let sampler = args.sampling.options(DEFAULT_REPEAT_PENALTY)?;
    let documents = args.files.iter().map(|path| input::read_text(path)).collect::<Outcome<Vec<_>>>()?;
    let text = join_documents(&documents);

    if let Some(stats) = &args.stats {
        output::check_file(stats)?;
    }
    let engine = args.engine.open(args.disk)?;
    let model_context = engine.model().config().context;
    let context = args.context.unwrap_or(model_context);
    warn_past_training(context, model_context);
    let summarizer = Summarizer {
        engine: &engine,
        context,
        session: &|capacity| args.memory.session(capacity, args.policy),
        generate: GenerateOptions { new_tokens, sampler, penalize_prompt: false, ignore_eos: args.ignore_eos },
        instruction: args.instruction.unwrap_or_else(|| default_instruction(args.max_words)),
    };
    let summary = summarizer.run(&text, &mut |piece| if args.json { Ok(()) } else { output::write_text(piece) })?;
    let last = summary.last;
    let device = args.engine.device().name();
    let report = Report::new(&engine, device, last.text, last.token_count, last.stop, &summary.facts)?;
    let report = Report { documents: Some(documents.len()), parts: Some(summary.parts), ..report };
    report.give(args.json, args.stats.as_deref())
}

/// One text of all documents; several are numbered, so that the model can tell them apart.
fn join_documents(documents: &[String]) -> String {
    match documents {
        [only] => only.clone(),
        _ => documents.iter().enumerate().map(|(i, d)| format!("Document {}:\n{}\n\n", i + 1, d.trim())).collect(),
    }
}
