//! Summaries of documents of any length: in one piece where the context holds it, else in parts and then of the parts' summaries.

use crate::generate::{GenerateOptions, Generated, SessionFacts, chat_tokens, generate};
use crate::program::{Failure, Outcome, say};
use crate::split::split_text;
use forebay::{Engine, SessionOptions};
use std::sync::Arc;

/// What to summarise with.
pub struct Summarizer<'a> {
    /// The model.
    pub engine: &'a Arc<Engine>,
    /// Tokens that prompt and summary may take together.
    pub context: usize,
    /// Makes the options of a session for a number of tokens.
    pub session: &'a dyn Fn(usize) -> SessionOptions,
    /// How text is made.
    pub generate: GenerateOptions,
    /// What the model is asked to do.
    pub instruction: String,
}

/// A summary and how it came to be.
pub struct Summary {
    /// What the last session made: the summary of everything.
    pub last: Generated,
    /// Parts that the documents themselves were cut into.
    pub parts: usize,
    /// Facts of all sessions.
    pub facts: Vec<SessionFacts>,
}

/// Rounds of summarising summaries; each makes the text several times shorter, so that more means that it does not get shorter.
const ROUNDS_MAX: usize = 8;

/// Tokens kept free in a part: the sum of its pieces' token counts may be a little less than the count of the whole.
const COUNT_RESERVE: usize = 32;

/// What the model is asked to do, where nothing is said. The questions keep models of a hundred million parameters with the
/// text; asked for a summary alone, they write about summaries.
pub fn default_instruction(max_words: Option<usize>) -> String {
    let length = match max_words {
        Some(words) => format!(" in at most {words} words"),
        None => String::new(),
    };
    format!("Write a summary of this document{length}. What is it about? What are the main points?")
}

/// Tokens that a summary of `words` words takes at most: English runs to 1.3 to 1.5 tokens a word.
pub fn tokens_for_words(words: usize) -> usize {
    words.saturating_mul(8) / 5 + 24
}

impl Summarizer<'_> {
    /// Summarises `text`; the pieces of the final summary go to `sink` as they are made.
    pub fn run(&self, text: &str, sink: &mut dyn FnMut(&str) -> Outcome<()>) -> Outcome<Summary> {
        let mut facts = Vec::new();
        let mut parts = 1;
        let mut text = text.to_string();
        for round in 0..ROUNDS_MAX {
            let what = if round == 0 { "this document" } else { "these summaries of the parts of a document" };
            let prompt = self.prompt(&text, what)?;
            if prompt.len() + self.generate.new_tokens <= self.context + 1 {
                let last = self.generate(&prompt, "reading", sink)?;
                facts.push(last.facts.clone());
                return Ok(Summary { last, parts, facts });
            }
            let pieces = self.parts(&text)?;
            if round == 0 {
                parts = pieces.len();
                say(&format!(
                    "the text takes {} tokens, more than the context of {} holds beside a summary: \
                     it is summarised in {parts} parts, then their summaries are",
                    prompt.len(),
                    self.context
                ));
            }
            let mut summaries = Vec::with_capacity(pieces.len());
            for (index, piece) in pieces.iter().enumerate() {
                let what = format!("this document, part {} of {}", index + 1, pieces.len());
                let prompt = self.prompt(piece, &what)?;
                let label = format!("reading part {} of {}", index + 1, pieces.len());
                let made = self.generate(&prompt, &label, &mut |_| Ok(()))?;
                log::info!("summary of part {} of {}: {}", index + 1, pieces.len(), made.text.trim());
                summaries.push(made.text.trim().to_string());
                facts.push(made.facts);
            }
            text = summaries.join("\n\n");
        }
        Err(Failure::Fault(format!("the summaries of the parts do not get shorter in {ROUNDS_MAX} rounds")))
    }

    fn generate(&self, prompt: &[u32], label: &str, sink: &mut dyn FnMut(&str) -> Outcome<()>) -> Outcome<Generated> {
        let session = (self.session)((prompt.len() + self.generate.new_tokens).min(self.context));
        generate(self.engine, &session, prompt, &self.generate, label, sink)
    }

    /// The text first and then what to do with it: small models forget what they read long ago.
    fn prompt(&self, text: &str, what: &str) -> Outcome<Vec<u32>> {
        let (text, instruction) = (text.trim(), &self.instruction);
        let user = format!("Read {what}:\n\n\"\"\"\n{text}\n\"\"\"\n\n{instruction}");
        chat_tokens(self.engine, None, &user)
    }

    /// Parts of `text` whose prompts fit the context beside their summaries.
    fn parts<'t>(&self, text: &'t str) -> Outcome<Vec<&'t str>> {
        let frame = self.prompt("", "this document, part 1000 of 1000")?.len();
        let reserved = frame + self.generate.new_tokens + COUNT_RESERVE;
        let limit = self.context.saturating_sub(reserved);
        // Parts at least twice as long as their summaries: otherwise the text would not get shorter.
        if limit < 2 * self.generate.new_tokens {
            return Err(Failure::usage(
                "--context",
                format!(
                    "{} tokens are too few to summarise in parts with summaries of {} tokens, expected at least {}",
                    self.context,
                    self.generate.new_tokens,
                    reserved + 2 * self.generate.new_tokens
                ),
            ));
        }
        let tokenizer = self.engine.tokenizer();
        let mut size = |piece: &str| tokenizer.encode(piece, false).map(|t| t.len());
        Ok(split_text(text, limit, &mut size)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_words_is_asked_for() {
        assert!(default_instruction(Some(120)).contains("at most 120 words"));
        assert!(!default_instruction(None).contains("words"));
        assert!(tokens_for_words(100) > 130 && tokens_for_words(usize::MAX) > 0);
    }
}
