//! Splitting a text into the pieces that byte-pair merges may not cross.
//!
//! The published patterns end in `\s+(?!\S)|\s+`: a run of white space leaves its last character to the word that follows. That
//! look-ahead needs a backtracking engine, whose steps a long input can exhaust. Here the patterns are regular, matched in linear time,
//! and the look-ahead is one comparison after the match.

use regex::Regex;

/// How a vocabulary wants its text split, from `tokenizer.ggml.pre`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Style {
    /// The pattern of GPT-2.
    Gpt2,
    /// Every digit on its own, then the pattern of GPT-2 on what is between.
    SmolLm,
    /// The pattern of Qwen2: every digit on its own, a word takes one preceding character.
    Qwen2,
    /// The pattern of Llama 3: as Qwen2, with digits in threes.
    Llama3,
}

/// The names of `tokenizer.ggml.pre` that are known, and what they mean.
const NAMES: &[(&str, Style)] = &[
    ("gpt-2", Style::Gpt2),
    ("gpt2", Style::Gpt2),
    ("smollm", Style::SmolLm),
    ("qwen2", Style::Qwen2),
    ("llama-bpe", Style::Llama3),
    ("llama3", Style::Llama3),
    ("llama-v3", Style::Llama3),
];

impl Style {
    pub(super) fn from_name(name: &str) -> Option<Self> {
        NAMES.iter().find(|(known, _)| *known == name).map(|&(_, style)| style)
    }

    /// The known names, for an error message.
    pub(super) fn names() -> String {
        NAMES.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
    }

    /// Whether a piece that is itself a token is taken whole, whatever the merges say.
    pub(super) fn ignores_merges(self) -> bool {
        self == Self::Llama3
    }

    fn pattern(self) -> &'static str {
        match self {
            Self::Gpt2 | Self::SmolLm => r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+",
            Self::Qwen2 => {
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
            }
            Self::Llama3 => {
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
            }
        }
    }
}

/// A compiled splitter.
#[derive(Debug)]
pub(super) struct Splitter {
    style: Style,
    pattern: Regex,
}

impl Splitter {
    pub(super) fn new(style: Style) -> Self {
        Self { style, pattern: Regex::new(style.pattern()).expect("the patterns are constants that a test compiles") }
    }

    /// Calls `piece` with every piece of `text`, in order; together they are `text`.
    pub(super) fn split<E>(&self, text: &str, mut piece: impl FnMut(&str) -> Result<(), E>) -> Result<(), E> {
        if self.style != Style::SmolLm {
            return self.split_span(text, &mut piece);
        }
        let mut start = 0;
        for (at, digit) in text.char_indices().filter(|(_, character)| character.is_numeric()) {
            self.split_span(&text[start..at], &mut piece)?;
            start = at + digit.len_utf8();
            piece(&text[at..start])?;
        }
        self.split_span(&text[start..], &mut piece)
    }

    fn split_span<E>(&self, text: &str, piece: &mut impl FnMut(&str) -> Result<(), E>) -> Result<(), E> {
        let mut start = 0;
        while start < text.len() {
            // The alternatives cover every character, so that a match begins where the last one ended.
            let Some(found) = self.pattern.find_at(text, start) else {
                return piece(&text[start..]);
            };
            let end = self.leave_last_space(text, start, found.end());
            piece(&text[start..end])?;
            start = end;
        }
        Ok(())
    }

    /// Where a match really ends: a run of two or more white-space characters before other text leaves its last one.
    fn leave_last_space(&self, text: &str, start: usize, end: usize) -> usize {
        let run = &text[start..end];
        let last = run.chars().next_back().filter(|last| last.is_whitespace() && end < text.len());
        let Some(last) = last.filter(|last| run.len() > last.len_utf8()) else {
            return end;
        };
        // `\s*[\r\n]+` and `...[\r\n]*` of the later patterns keep what they took; a run that came from `\s+` has no line end.
        let keeps = matches!(self.style, Style::Qwen2 | Style::Llama3) && matches!(last, '\r' | '\n');
        if keeps || !run.chars().next().is_some_and(char::is_whitespace) {
            return end;
        }
        end - last.len_utf8()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use super::*;
    use proptest::prelude::*;
    use tokenizers::pre_tokenizers::PreTokenizerWrapper;
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;
    use tokenizers::pre_tokenizers::digits::Digits;
    use tokenizers::pre_tokenizers::sequence::Sequence;
    use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, SplitDelimiterBehavior};

    /// A splitter and the published pre-tokenizer of the same style, on the backtracking engine.
    static BOTH: LazyLock<[(Splitter, Sequence); 4]> =
        LazyLock::new(|| STYLES.map(|style| (Splitter::new(style), reference(style))));

    fn reference(style: Style) -> Sequence {
        let split = |pattern: &str| {
            let split =
                Split::new(SplitPattern::Regex(pattern.to_string()), SplitDelimiterBehavior::Isolated, false).unwrap();
            PreTokenizerWrapper::Split(split)
        };
        let words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|";
        let rest = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
        let gpt2 = PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, true, true));
        Sequence::new(match style {
            Style::Gpt2 => vec![gpt2],
            Style::SmolLm => vec![PreTokenizerWrapper::Digits(Digits::new(true)), gpt2],
            Style::Qwen2 => vec![split(&format!(r"{words}\p{{N}}{rest}"))],
            Style::Llama3 => vec![split(&format!(r"{words}\p{{N}}{{1,3}}{rest}"))],
        })
    }

    fn pieces(splitter: &Splitter, text: &str) -> Vec<String> {
        let mut pieces = Vec::new();
        let done: Result<(), ()> = splitter.split(text, |piece| {
            pieces.push(piece.to_string());
            Ok(())
        });
        done.unwrap();
        pieces
    }

    fn published_pieces(reference: &Sequence, text: &str) -> Vec<String> {
        let mut string = PreTokenizedString::from(text);
        reference.pre_tokenize(&mut string).unwrap();
        let splits = string.get_splits(OffsetReferential::Original, OffsetType::Byte);
        splits.iter().map(|(_, (start, end), _)| text[*start..*end].to_string()).collect()
    }

    const STYLES: [Style; 4] = [Style::Gpt2, Style::SmolLm, Style::Qwen2, Style::Llama3];

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        #[test]
        fn pieces_are_those_of_the_published_patterns(text in "([ \t\r\n]{0,3}|[a-zA-Z]{1,4}|'[sStTdDmMlLrReEvV]{1,2}|[0-9٣½]{1,5}|[\u{a0}\u{3000}é日本🙂.,!?()-]{1,3}){0,12}") {
            for (ours, published) in BOTH.iter() {
                prop_assert_eq!(pieces(ours, &text), published_pieces(published, &text), "{:?}", ours.style);
            }
        }

        #[test]
        fn pieces_of_any_text_are_those_of_the_published_patterns(text in any::<String>()) {
            for (ours, published) in BOTH.iter() {
                prop_assert_eq!(pieces(ours, &text), published_pieces(published, &text), "{:?}", ours.style);
            }
        }
    }

    #[test]
    fn a_run_of_spaces_leaves_one_for_the_word() {
        let pieces = |style, text| pieces(&Splitter::new(style), text);
        assert_eq!(pieces(Style::Gpt2, "a   b"), ["a", "  ", " b"]);
        assert_eq!(pieces(Style::Qwen2, "a \n  b"), ["a", " \n", " ", " b"]);
        assert_eq!(pieces(Style::SmolLm, "x  12"), ["x", "  ", "1", "2"]);
        assert_eq!(pieces(Style::Llama3, "12345"), ["123", "45"]);
    }
}
