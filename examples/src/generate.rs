//! One run of a session: prefill of the prompt, then tokens until the text ends.

use crate::interrupt;
use crate::program::{Failure, Outcome};
use crate::progress::PrefillBar;
use forebay::model::{Message, encode_chat};
use forebay::sampler::{Sampler, SamplerOptions};
use forebay::{Engine, Session, SessionOptions, SessionStats};
use std::sync::Arc;

/// What to generate.
#[derive(Clone, Debug)]
pub struct GenerateOptions {
    /// Most tokens to generate.
    pub new_tokens: usize,
    /// How tokens are drawn.
    pub sampler: SamplerOptions,
    /// Whether the repeat penalty looks at the prompt, too.
    pub penalize_prompt: bool,
    /// Go on when the model says that the text ends.
    pub ignore_eos: bool,
}

/// What came of it.
#[derive(Clone, Debug)]
pub struct Generated {
    /// The text, without the token that ended it.
    pub text: String,
    /// Tokens generated, without the one that ended the text.
    pub token_count: usize,
    /// Why it ended: `end` (the model said so) or `length`.
    pub stop: &'static str,
    /// Facts of the session at its end.
    pub facts: SessionFacts,
}

/// What a report says of a session after it has gone.
#[derive(Clone, Debug)]
pub struct SessionFacts {
    /// Counters and times.
    pub stats: SessionStats,
    /// Tokens that the session had room for.
    pub context: usize,
    /// The policy's name.
    pub policy: &'static str,
    /// Settings of the tiers; null under policy `full`.
    pub settings: serde_json::Value,
    /// Named bytes of the memory plan.
    pub plan: serde_json::Value,
    /// How the sketch's projections were made.
    pub adapter: serde_json::Value,
    /// What they were made from.
    pub adapter_source: Option<&'static str>,
    /// The store's I/O backend.
    pub io_backend: Option<&'static str>,
}

impl SessionFacts {
    /// Facts of `session` now; `after_prefill` says whether its projections were there when prefill ended.
    pub fn new(session: &Session, after_prefill: bool) -> SessionFacts {
        let to_json = |value: Result<serde_json::Value, _>| value.unwrap_or(serde_json::Value::Null);
        let items = |items: &[forebay::plan::PlanItem]| -> serde_json::Value {
            items.iter().map(|i| (i.name.to_string(), serde_json::Value::from(i.bytes))).collect()
        };
        let plan = session.plan();
        let adapter = session.adapter_kind();
        SessionFacts {
            stats: session.stats(),
            context: session.capacity(),
            policy: session.policy().name(),
            settings: to_json(serde_json::to_value(session.config())),
            plan: serde_json::json!({"kv": items(&plan.kv), "prefill": items(&plan.prefill)}),
            adapter: to_json(serde_json::to_value(adapter)),
            adapter_source: adapter.map(|_| if after_prefill { "prompt" } else { "generated text" }),
            io_backend: session.store_backend(),
        }
    }
}

/// Tokens of a conversation with one question, ready for the answer.
pub fn chat_tokens(engine: &Engine, system: Option<&str>, user: &str) -> Outcome<Vec<u32>> {
    let mut messages = Vec::with_capacity(2);
    if let Some(system) = system {
        messages.push(Message::new("system", system));
    }
    messages.push(Message::new("user", user));
    Ok(encode_chat(engine.chat(), engine.tokenizer(), &messages, true)?)
}

/// Runs a new session over `prompt` and gives each piece of text, always whole characters, to `sink`.
pub fn generate(
    engine: &Arc<Engine>,
    session: &SessionOptions,
    prompt: &[u32],
    options: &GenerateOptions,
    label: &str,
    sink: &mut dyn FnMut(&str) -> Outcome<()>,
) -> Outcome<Generated> {
    let mut session = engine.session(session)?;
    interrupt::watch(session.cancel_handle());
    let mut bar = PrefillBar::new(label);
    session.prefill(prompt, &mut |progress| bar.update(progress))?;
    drop(bar);
    let after_prefill = session.adapter_kind().is_some();

    let mut sampler = Sampler::new(options.sampler)?;
    let tokenizer = engine.tokenizer();
    let mut decoder = tokenizer.stream(true);
    let mut history = if options.penalize_prompt { prompt.to_vec() } else { Vec::new() };
    let mut text = String::new();
    let (mut token_count, mut stop) = (0, "length");
    let mut give = |piece: Option<String>| -> Outcome<()> {
        let Some(piece) = piece else { return Ok(()) };
        text.push_str(&piece);
        sink(&piece)
    };
    while token_count < options.new_tokens {
        interrupt::check()?;
        let token = sampler.sample(session.logits_mut(), &history)?;
        if tokenizer.is_end_of_generation(token) && !options.ignore_eos {
            stop = "end";
            break;
        }
        history.push(token);
        token_count += 1;
        give(decoder.push(token))?;
        // The last token's successor is not needed.
        if token_count < options.new_tokens {
            session.step(token)?;
        }
    }
    give(decoder.flush())?;
    Ok(Generated { text, token_count, stop, facts: SessionFacts::new(&session, after_prefill) })
}

/// A failure unless `count`, the value of `option`, is at least 1.
pub fn at_least_one(option: &str, count: usize) -> Outcome<()> {
    if count == 0 { Err(Failure::usage(option, "0, expected at least 1")) } else { Ok(()) }
}
