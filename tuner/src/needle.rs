//! A needle in a haystack: one sentence with a number somewhere in a long text, and a question about the number at its end.

use forebay::model::{Message, encode_chat};
use forebay::sampler::greedy;
use forebay::{Engine, Error, Result, SessionOptions, SessionStats};
use serde::Serialize;
use std::sync::Arc;

use crate::evaluate::Watch;

/// Tokens of an answer: the number, which models spell a digit a token, and a few words around it.
pub const ANSWER_TOKENS: usize = 16;

/// What the model is asked.
pub const QUESTION: &str = "What is the magic number that the text above mentions?";

/// How the model's answer begins. Small models ramble before they come to the number; with the beginning given, as in the RULER
/// benchmark, what is measured is whether they find it.
pub const ANSWER_START: &str = "The magic number is";

/// One text with its number.
#[derive(Clone, Debug)]
pub struct Case {
    /// Where the needle is, as a share of the haystack.
    pub depth: f64,
    /// The number that the answer has to contain.
    pub number: String,
    /// Tokens of the whole conversation.
    pub prompt: Vec<u32>,
}

/// The needle as it stands in the text.
pub fn needle_sentence(number: &str) -> String {
    format!("The magic number is {number}. ")
}

/// A number of five or six digits, the same for the same seed and index.
pub fn magic_number(seed: u64, index: u64) -> String {
    // SplitMix64 (Steele, Lea, Flood 2014): one multiplication chain per number, and neighbouring seeds are unrelated.
    let mut z = seed.wrapping_add((index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^= z >> 31;
    (10_000 + z % 990_000).to_string()
}

/// Puts `needle` into `text` at the border of sentences nearest to `depth` (0 is the start, 1 the end).
pub fn insert_needle(text: &str, needle: &str, depth: f64) -> String {
    let wanted = (text.len() as f64 * depth.clamp(0.0, 1.0)).round() as usize;
    let at = sentence_borders(text).into_iter().min_by_key(|border| border.abs_diff(wanted)).unwrap_or(0);
    let (before, after) = text.split_at(at);
    let space = if before.is_empty() || before.ends_with(char::is_whitespace) { "" } else { " " };
    format!("{before}{space}{needle}{after}")
}

/// Byte offsets at which a sentence may begin, the text's start and end among them, ascending.
pub fn sentence_borders(text: &str) -> Vec<usize> {
    let mut borders = vec![0];
    let mut at = 0;
    while at < text.len() {
        at = forebay_examples::split::sentence_end(text, at);
        borders.push(at);
    }
    borders
}

/// The conversation about a haystack that already holds its needle, up to the middle of the answer.
fn conversation(engine: &Engine, haystack: &str) -> Result<Vec<u32>> {
    let user = format!("{haystack}\n\n{QUESTION}");
    let mut tokens = encode_chat(engine.chat(), engine.tokenizer(), &[Message::new("user", user)], true)?;
    tokens.extend(engine.tokenizer().encode(ANSWER_START, false)?);
    Ok(tokens)
}

/// Makes the case of `number` at `depth`: as much of `haystack` as makes a conversation of at most `context` tokens.
pub fn case(engine: &Engine, haystack: &str, context: usize, depth: f64, number: &str) -> Result<Case> {
    let needle = needle_sentence(number);
    let tokenizer = engine.tokenizer();
    let tokens = tokenizer.encode(haystack, false)?;
    let frame = conversation(engine, &needle)?.len();
    let mut room = context.saturating_sub(frame);
    if room == 0 || tokens.len() < room {
        let have = tokens.len() + frame;
        return Err(Error::Argument {
            argument: "context",
            found: context.to_string(),
            expected: format!("more than {frame} (question and needle), at most {have} (with the whole haystack)"),
        });
    }
    // Cutting tokens and joining texts changes token counts by a few at the seams.
    for _ in 0..SEAM_TRIES {
        let text = tokenizer.decode(&tokens[..room], false);
        let text = text.trim_end_matches(char::REPLACEMENT_CHARACTER);
        let prompt = conversation(engine, &insert_needle(text, &needle, depth))?;
        if prompt.len() <= context {
            return Ok(Case { depth, number: number.to_string(), prompt });
        }
        room = room.saturating_sub(prompt.len() - context);
    }
    Err(Error::Internal(format!("a haystack of {context} tokens does not come out after {SEAM_TRIES} tries")))
}

/// Every try takes off what was too much, so that the second nearly always fits.
const SEAM_TRIES: usize = 16;

/// What a session answered.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Its text.
    pub text: String,
    /// Whether the number is in it.
    pub correct: bool,
    /// The session.
    pub stats: SessionStats,
}

/// Asks a new session, greedily.
pub fn ask(engine: &Arc<Engine>, case: &Case, options: &SessionOptions, watch: &mut Watch) -> Result<Answer> {
    let mut session = engine.session(options)?;
    (watch.session)(session.cancel_handle());
    session.prefill(&case.prompt, watch.progress)?;
    let mut answer = Vec::with_capacity(ANSWER_TOKENS);
    while let Some(token) = greedy(session.logits()).filter(|&t| !engine.tokenizer().is_end_of_generation(t)) {
        answer.push(token);
        if answer.len() == ANSWER_TOKENS {
            break;
        }
        session.step(token)?;
    }
    let text = engine.tokenizer().decode(&answer, true);
    Ok(Answer { correct: contains_number(&text, &case.number), text, stats: session.stats() })
}

/// Whether `text` says `number`, with or without commas between thousands, and not as part of a longer one.
pub fn contains_number(text: &str, number: &str) -> bool {
    let text = text.replace(',', "");
    text.split(|c: char| !c.is_ascii_digit()).any(|digits| digits == number)
}

/// One policy's results, with the names of the command contract.
#[derive(Clone, Debug, Serialize)]
pub struct NeedleReport {
    /// The policy.
    pub policy: &'static str,
    /// Questions asked.
    pub cases: usize,
    /// Right answers of the full cache.
    pub correct_full: usize,
    /// Right answers of the policy.
    pub correct: usize,
    /// KV-side memory of a session.
    pub kv_memory_bytes: u64,
    /// A full f16 cache of the same tokens.
    pub kv_full_bytes: u64,
    /// Share of selected groups that were in memory already.
    pub reuse_rate: f64,
    /// Settings of the tiers; null under policy `full`.
    pub settings: serde_json::Value,
    /// One row per depth.
    pub depths: Vec<DepthReport>,
}

/// The cases at one depth.
#[derive(Clone, Debug, Serialize)]
pub struct DepthReport {
    /// Where the needle is.
    pub depth: f64,
    /// Questions asked.
    pub cases: usize,
    /// Right answers of the full cache.
    pub correct_full: usize,
    /// Right answers of the policy.
    pub correct: usize,
    /// The numbers that were hidden.
    pub numbers: Vec<String>,
    /// What the policy answered.
    pub answers: Vec<String>,
}

/// One case, what the full cache answered and what the policy did.
pub struct Asked<'a> {
    /// The case.
    pub case: &'a Case,
    /// Answer of the full cache.
    pub full: &'a Answer,
    /// Answer of the policy.
    pub answer: &'a Answer,
}

/// Puts one policy's answers (at least one) together; cases of one depth stand next to each other.
pub fn report(policy: &'static str, settings: serde_json::Value, asked: &[Asked<'_>]) -> Option<NeedleReport> {
    let count = |asked: &[Asked<'_>], right: fn(&Asked<'_>) -> bool| asked.iter().filter(|a| right(a)).count();
    let depth = |asked: &[Asked<'_>]| DepthReport {
        depth: asked[0].case.depth,
        cases: asked.len(),
        correct_full: count(asked, |a| a.full.correct),
        correct: count(asked, |a| a.answer.correct),
        numbers: asked.iter().map(|a| a.case.number.clone()).collect(),
        answers: asked.iter().map(|a| a.answer.text.clone()).collect(),
    };
    let largest = &asked.iter().map(|a| &a.answer.stats).max_by_key(|s| s.kv_memory_bytes)?;
    let selected: u64 = asked.iter().map(|a| a.answer.stats.groups_selected).sum();
    let reused: u64 = asked.iter().map(|a| a.answer.stats.groups_reused).sum();
    Some(NeedleReport {
        policy,
        cases: asked.len(),
        correct_full: count(asked, |a| a.full.correct),
        correct: count(asked, |a| a.answer.correct),
        kv_memory_bytes: largest.kv_memory_bytes,
        kv_full_bytes: largest.kv_full_bytes,
        reuse_rate: if selected > 0 { reused as f64 / selected as f64 } else { 0.0 },
        settings,
        depths: asked.chunk_by(|a, b| a.case.depth == b.case.depth).map(depth).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "First sentence. Second one! Third? Grüße an alle. The end";

    #[test]
    fn the_needle_stands_between_sentences_and_nothing_is_lost() {
        for step in 0..=20 {
            let depth = f64::from(step) / 20.0;
            let with = insert_needle(TEXT, "NEEDLE. ", depth);
            assert_eq!(with.replacen("NEEDLE. ", "", 1).trim_end(), TEXT, "depth {depth}");
            let at = with.find("NEEDLE").unwrap();
            assert!(at == 0 || with[..at].ends_with([' ', '\n']), "{with}");
        }
        assert!(insert_needle(TEXT, "N. ", 0.0).starts_with("N. First"));
        assert!(insert_needle(TEXT, "N. ", 1.0).ends_with("The end N. "));
        assert!(insert_needle(TEXT, "N. ", 0.45).contains("Second one! N. Third?"));
    }

    #[test]
    fn numbers_have_five_or_six_digits_and_follow_the_seed() {
        let numbers: Vec<String> = (0..1000).map(|i| magic_number(7, i)).collect();
        assert!(numbers.iter().all(|n| matches!(n.len(), 5 | 6) && !n.starts_with('0')));
        assert_eq!(magic_number(7, 3), numbers[3]);
        let mut distinct = numbers.clone();
        distinct.sort();
        distinct.dedup();
        assert!(distinct.len() > 990);
        assert_ne!(magic_number(8, 3), numbers[3]);
    }

    #[test]
    fn answers_are_counted_by_depth() {
        let answer = |correct| Answer { text: String::new(), correct, stats: SessionStats::default() };
        let (right, wrong) = (answer(true), answer(false));
        let case = |depth| Case { depth, number: "12345".into(), prompt: Vec::new() };
        let (early, late) = (case(0.1), case(0.9));
        let asked = |case, full, answer| Asked { case, full, answer };
        let all = [asked(&early, &right, &right), asked(&early, &right, &wrong), asked(&late, &wrong, &right)];
        let r = report("window", serde_json::Value::Null, &all).unwrap();
        assert_eq!((r.cases, r.correct_full, r.correct), (3, 2, 2));
        let rows: Vec<_> = r.depths.iter().map(|d| (d.depth, d.cases, d.correct_full, d.correct)).collect();
        assert_eq!(rows, [(0.1, 2, 2, 1), (0.9, 1, 0, 1)]);
        assert_eq!(r.depths[0].numbers, ["12345", "12345"]);
        assert!(report("window", serde_json::Value::Null, &[]).is_none());
    }

    #[test]
    fn an_answer_counts_when_it_says_exactly_the_number() {
        assert!(contains_number("The magic number is 48213.", "48213"));
        assert!(contains_number("48,213", "48213"));
        assert!(!contains_number("148213", "48213"));
        assert!(!contains_number("4821", "48213"));
        assert!(!contains_number("", "48213"));
    }
}
