//! `forebay-generate`: continues a prompt, or answers it with `--chat`.

use clap::Parser;
use forebay::config::Policy;
use forebay::store::DiskClass;
use forebay_examples::cli::{EngineArgs, MemoryArgs, SamplingArgs, parse_disk, parse_policy, plan_context};
use forebay_examples::generate::{GenerateOptions, at_least_one, chat_tokens, generate};
use forebay_examples::report::Report;
use forebay_examples::{Failure, Outcome, input, output, program};
use std::path::PathBuf;
use std::process::ExitCode;

/// Generate text from a prompt, with the KV cache on disk.
#[derive(Parser)]
#[command(version)]
struct Args {
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    memory: MemoryArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// The prompt
    #[arg(long, value_name = "TEXT", required_unless_present = "prompt_file", conflicts_with = "prompt_file")]
    prompt: Option<String>,
    /// File that holds the prompt; - is standard input
    #[arg(long, value_name = "FILE")]
    prompt_file: Option<PathBuf>,
    /// The prompt is a question: put it into the model's chat template
    #[arg(long)]
    chat: bool,
    /// System message in front of the question
    #[arg(long, value_name = "TEXT", requires = "chat")]
    system: Option<String>,
    /// Most tokens to generate
    #[arg(long, value_name = "N", default_value_t = 256)]
    max_new_tokens: usize,
    /// Tokens that prompt and answer may take together [default: what they need, at most the model's context]
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

fn main() -> ExitCode {
    program::run(generate_text)
}

fn generate_text(args: Args) -> Outcome<()> {
    at_least_one("--max-new-tokens", args.max_new_tokens)?;
    let sampler = args.sampling.options(1.0)?;
    let prompt = match (&args.prompt, &args.prompt_file) {
        (_, Some(path)) => input::read_text(path)?,
        (Some(text), None) if !text.is_empty() => text.clone(),
        _ => return Err(Failure::usage("--prompt", "is empty, expected text")),
    };
    if let Some(stats) = &args.stats {
        output::check_file(stats)?;
    }
    let engine = args.engine.open(args.disk)?;
    let tokens = if args.chat {
        chat_tokens(&engine, args.system.as_deref(), &prompt)?
    } else {
        engine.tokenizer().encode_with_bos(&prompt, true)?
    };
    let plan = plan_context(engine.model().config().context, args.context, tokens.len(), args.max_new_tokens)?;
    let options =
        GenerateOptions { new_tokens: plan.new_tokens, sampler, penalize_prompt: true, ignore_eos: args.ignore_eos };
    let session = args.memory.session(plan.capacity, args.policy);
    let made = generate(&engine, &session, &tokens, &options, "reading the prompt", &mut |piece| {
        if args.json { Ok(()) } else { output::write_text(piece) }
    })?;
    let device = args.engine.device().name();
    let report = Report::new(&engine, device, made.text, made.token_count, made.stop, &[made.facts])?;
    report.give(args.json, args.stats.as_deref())
}
