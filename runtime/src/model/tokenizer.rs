//! Text to tokens and back, from the vocabulary in a GGUF file: byte-level byte-pair encoding.
//!
//! Control tokens (`<|im_end|>` and the like) are recognised in text only where the caller asks for it. A document never does: whatever
//! it contains, it cannot end a turn or begin another.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;

use aho_corasick::{AhoCorasick, MatchKind};
use tokenizers::Model as _;
use tokenizers::models::bpe::{BPE, Vocab};

use super::error::{ModelError, Result};
use super::gguf::Gguf;
use super::pretokenize::{Splitter, Style};

/// The kinds of `tokenizer.ggml.token_type` that matter here.
const KIND_UNKNOWN: i64 = 2;
const KIND_CONTROL: i64 = 3;
const KIND_USER_DEFINED: i64 = 4;
/// Control tokens that end a text, where the metadata names only one of them.
const END_NAMES: &[&str] = &[
    "<|im_end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "</s>",
    "<EOT>",
];
/// Words whose tokens are remembered. A word is short (the crate keeps none above 256 bytes).
const WORD_CACHE_COUNT: usize = 10_000;

/// The bytes of every token, one after the other.
#[derive(Debug)]
struct Pieces {
    bytes: Vec<u8>,
    /// `[vocab + 1]`: token `i` is `bytes[ends[i]..ends[i + 1]]`.
    ends: Vec<usize>,
    control: Vec<bool>,
}

impl Pieces {
    /// The bytes of a token; nothing for a control token that is to be left out. `None` for an id outside the vocabulary.
    fn get(&self, token: u32, skip_special: bool) -> Option<&[u8]> {
        let index = token as usize;
        let end = *self.ends.get(index + 1)?;
        match skip_special && self.control[index] {
            true => Some(&[]),
            false => Some(&self.bytes[self.ends[index]..end]),
        }
    }
}

/// Turns text into tokens and tokens into text.
pub struct Tokenizer {
    bpe: BPE,
    splitter: Splitter,
    /// Finds special tokens; pattern `i` is token `special_ids[i]`.
    special: Option<AhoCorasick>,
    special_ids: Vec<u32>,
    pieces: Arc<Pieces>,
    bos: Option<u32>,
    eos: Option<u32>,
    eot: Option<u32>,
    add_bos: bool,
    ends: Vec<u32>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab", &self.vocab_size())
            .field("special", &self.special_ids.len())
            .finish()
    }
}

impl Tokenizer {
    /// Builds the tokenizer from `tokenizer.ggml.*`.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self> {
        let source = Source { gguf };
        let model = source.gguf.string("tokenizer.ggml.model")?.unwrap_or("absent");
        if model != "gpt2" {
            return Err(source.wrong(format!("tokenizer.ggml.model is {model:?}, expected \"gpt2\" (byte-level BPE)")));
        }
        let style = source.style()?;
        let tokens = source.list("tokenizer.ggml.tokens", gguf.strings("tokenizer.ggml.tokens")?)?;
        if u32::try_from(tokens.len()).is_err() {
            return Err(source.wrong(format!("{} tokens, expected at most {}", tokens.len(), u32::MAX)));
        }
        let kinds = match gguf.integers("tokenizer.ggml.token_type")? {
            Some(kinds) if kinds.len() == tokens.len() => kinds,
            Some(kinds) => {
                let (found, expected) = (kinds.len(), tokens.len());
                return Err(source.wrong(format!("{found} token types, expected {expected}, one for each token")));
            }
            None => vec![1; tokens.len()],
        };
        let (special, special_ids) = source.special(&tokens, &kinds)?;
        let by_text = |names: &[&str]| {
            special_ids.iter().copied().filter(|&id| names.contains(&tokens[id as usize])).collect::<Vec<_>>()
        };
        let bos = source.token("tokenizer.ggml.bos_token_id", tokens.len())?;
        let eos = source.token("tokenizer.ggml.eos_token_id", tokens.len())?;
        let eot = match source.token("tokenizer.ggml.eot_token_id", tokens.len())? {
            Some(eot) => Some(eot),
            None => by_text(&["<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>"]).first().copied(),
        };
        let mut ends = by_text(END_NAMES);
        ends.extend(eos);
        ends.extend(eot);
        ends.extend(source.token("tokenizer.ggml.eom_token_id", tokens.len())?);
        ends.sort_unstable();
        ends.dedup();
        Ok(Self {
            bpe: source.bpe(style, &tokens, &kinds)?,
            splitter: Splitter::new(style),
            special,
            special_ids,
            pieces: Arc::new(pieces(&tokens, &kinds)),
            bos,
            eos,
            eot,
            add_bos: gguf.boolean("tokenizer.ggml.add_bos_token")?.unwrap_or(style == Style::Llama3),
            ends,
        })
    }

    /// The tokens of `text`, without a begin-of-text token. With `parse_special`, control and user-defined tokens that are spelled out
    /// in the text become those tokens (for a chat template); without it they are text like any other (for what a user or a document says).
    pub fn encode(&self, text: &str, parse_special: bool) -> Result<Vec<u32>> {
        match parse_special {
            true => self.encode_with_special(text, |plain, tokens| self.encode_plain(plain, tokens)),
            false => {
                let mut tokens = Vec::new();
                self.encode_plain(text, &mut tokens)?;
                Ok(tokens)
            }
        }
    }

    /// [`Self::encode`], with the begin-of-text token in front where the model wants one.
    pub fn encode_with_bos(&self, text: &str, parse_special: bool) -> Result<Vec<u32>> {
        let mut tokens = self.encode(text, parse_special)?;
        self.prepend_bos(&mut tokens);
        Ok(tokens)
    }

    /// Puts the begin-of-text token in front where the model wants one and it is not there yet.
    pub(super) fn prepend_bos(&self, tokens: &mut Vec<u32>) {
        if let Some(bos) = self.bos.filter(|&bos| self.add_bos && tokens.first() != Some(&bos)) {
            tokens.insert(0, bos);
        }
    }

    /// Finds the special tokens of `text` and leaves what is between them to `plain`.
    pub(super) fn encode_with_special(
        &self,
        text: &str,
        mut plain: impl FnMut(&str, &mut Vec<u32>) -> Result<()>,
    ) -> Result<Vec<u32>> {
        let mut tokens = Vec::new();
        let mut start = 0;
        for found in self.special.iter().flat_map(|special| special.find_iter(text)) {
            plain(&text[start..found.start()], &mut tokens)?;
            tokens.push(self.special_ids[found.pattern().as_usize()]);
            start = found.end();
        }
        plain(&text[start..], &mut tokens)?;
        Ok(tokens)
    }

    /// Appends the tokens of a text in which nothing is special.
    pub(super) fn encode_plain(&self, text: &str, tokens: &mut Vec<u32>) -> Result<()> {
        let mut mapped = String::new();
        self.splitter.split(text, |piece| {
            mapped.clear();
            mapped.extend(piece.bytes().map(byte_to_char));
            let word = self.bpe.tokenize(&mapped).map_err(|problem| ModelError::Encode(problem.to_string()))?;
            tokens.extend(word.into_iter().map(|token| token.id));
            Ok(())
        })
    }

    /// Finds the spellings of special tokens; none where the vocabulary has none.
    pub(super) fn special_matcher(&self) -> Option<&AhoCorasick> {
        self.special.as_ref()
    }

    /// The spellings of the special tokens.
    pub(super) fn special_texts(&self) -> impl Iterator<Item = &str> {
        self.special_ids.iter().filter_map(|&id| std::str::from_utf8(self.pieces.get(id, false)?).ok())
    }

    /// The text of `tokens`. Bytes that are not UTF-8, and ids outside the vocabulary, become U+FFFD.
    pub fn decode(&self, tokens: &[u32], skip_special: bool) -> String {
        let mut decoder = self.stream(skip_special);
        let mut text: String = tokens.iter().filter_map(|&token| decoder.push(token)).collect();
        text.extend(decoder.flush());
        text
    }

    /// A decoder for tokens that come one at a time.
    pub fn stream(&self, skip_special: bool) -> StreamDecoder {
        StreamDecoder { pieces: Arc::clone(&self.pieces), skip_special, pending: Vec::new() }
    }

    /// The bytes of a token; `None` for an id outside the vocabulary.
    pub fn token_bytes(&self, token: u32) -> Option<&[u8]> {
        self.pieces.get(token, false)
    }

    /// Tokens in the vocabulary.
    pub fn vocab_size(&self) -> usize {
        self.pieces.control.len()
    }

    /// The begin-of-text token.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The end-of-text token.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// The end-of-turn token.
    pub fn eot(&self) -> Option<u32> {
        self.eot
    }

    /// Whether the model wants its begin-of-text token in front.
    pub fn adds_bos(&self) -> bool {
        self.add_bos
    }

    /// Whether generation ends at this token: end of text, end of turn, or another control token that means as much.
    pub fn is_end_of_generation(&self, token: u32) -> bool {
        self.ends.binary_search(&token).is_ok()
    }

    /// Whether a token is a control token: not text.
    pub fn is_control(&self, token: u32) -> bool {
        self.pieces.control.get(token as usize).copied().unwrap_or(false)
    }
}

/// Decodes a stream of tokens into whole characters: bytes wait until their character is complete.
#[derive(Debug, Clone)]
pub struct StreamDecoder {
    pieces: Arc<Pieces>,
    skip_special: bool,
    /// The start of a character: at most three bytes between calls.
    pending: Vec<u8>,
}

impl StreamDecoder {
    /// Takes one token and gives the text that is now complete, if any.
    pub fn push(&mut self, token: u32) -> Option<String> {
        match self.pieces.get(token, self.skip_special) {
            Some(bytes) => self.pending.extend_from_slice(bytes),
            None => self.pending.extend_from_slice("\u{fffd}".as_bytes()),
        }
        let mut text = String::new();
        let mut done = 0;
        while done < self.pending.len() {
            match std::str::from_utf8(&self.pending[done..]) {
                Ok(rest) => {
                    text.push_str(rest);
                    done = self.pending.len();
                }
                Err(error) => {
                    let valid = done + error.valid_up_to();
                    text.push_str(&String::from_utf8_lossy(&self.pending[done..valid]));
                    let Some(wrong) = error.error_len() else {
                        done = valid;
                        break;
                    };
                    text.push(char::REPLACEMENT_CHARACTER);
                    done = valid + wrong;
                }
            }
        }
        self.pending.drain(..done);
        Some(text).filter(|text| !text.is_empty())
    }

    /// Ends the stream: a character that never became complete is U+FFFD.
    pub fn flush(&mut self) -> Option<String> {
        let incomplete = !self.pending.is_empty();
        self.pending.clear();
        incomplete.then(|| char::REPLACEMENT_CHARACTER.to_string())
    }
}

/// The file that a tokenizer is built from.
struct Source<'a> {
    gguf: &'a Gguf,
}

impl Source<'_> {
    fn style(&self) -> Result<Style> {
        let Some(name) = self.gguf.string("tokenizer.ggml.pre")?.filter(|&name| name != "default") else {
            log::warn!("{}: the file does not say how text is split, taking GPT-2's way", self.gguf.path().display());
            return Ok(Style::Gpt2);
        };
        Style::from_name(name)
            .ok_or_else(|| self.wrong(format!("tokenizer.ggml.pre is {name:?}, expected one of: {}", Style::names())))
    }

    fn list<T>(&self, key: &str, list: Option<Vec<T>>) -> Result<Vec<T>> {
        match list {
            Some(list) if !list.is_empty() => Ok(list),
            _ => Err(self.wrong(format!("{key} is absent or empty, expected a list"))),
        }
    }

    fn token(&self, key: &str, vocab: usize) -> Result<Option<u32>> {
        match self.gguf.unsigned(key)? {
            Some(id) if id >= vocab as u64 => Err(self.wrong(format!("{key} is {id}, expected below {vocab}"))),
            id => Ok(id.map(|id| id as u32)),
        }
    }

    fn special(&self, tokens: &[&str], kinds: &[i64]) -> Result<(Option<AhoCorasick>, Vec<u32>)> {
        let is_special = |&id: &usize| matches!(kinds[id], KIND_CONTROL | KIND_USER_DEFINED) && !tokens[id].is_empty();
        let ids: Vec<u32> = (0..tokens.len()).filter(is_special).map(|id| id as u32).collect();
        if ids.is_empty() {
            return Ok((None, ids));
        }
        let texts = ids.iter().map(|&id| tokens[id as usize]);
        match AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(texts) {
            Ok(matcher) => Ok((Some(matcher), ids)),
            Err(problem) => Err(self.wrong(format!("special tokens: {problem}"))),
        }
    }

    /// The merges' model. Control tokens are left out of its vocabulary, so that no text can become one.
    fn bpe(&self, style: Style, tokens: &[&str], kinds: &[i64]) -> Result<BPE> {
        let mut seen = HashSet::with_capacity(tokens.len());
        let mut vocab = Vocab::with_capacity(tokens.len());
        for (id, &token) in tokens.iter().enumerate() {
            if !token.is_empty() && !seen.insert(token) {
                return Err(self.wrong(format!("token {token:?} stands there twice, expected once")));
            }
            if !token.is_empty() && !matches!(kinds[id], KIND_CONTROL | KIND_UNKNOWN) {
                vocab.insert(token.to_string(), id as u32);
            }
        }
        let missing =
            (0..=u8::MAX).filter(|&byte| !vocab.contains_key(byte_to_char(byte).encode_utf8(&mut [0; 4]) as &str));
        // Bytes that no UTF-8 text has (C0, C1, F5 to FF) are often left out of a vocabulary.
        let missing: Vec<u8> = missing.filter(|byte| !matches!(byte, 0xc0 | 0xc1 | 0xf5..)).collect();
        if !missing.is_empty() {
            log::info!("{}: no token for bytes {missing:02x?}: text loses them", self.gguf.path().display());
        }
        let lines = self.gguf.strings("tokenizer.ggml.merges")?.unwrap_or_default();
        let mut merges = Vec::with_capacity(lines.len());
        for (rank, line) in lines.into_iter().enumerate() {
            // A token may begin with a space only where a vocabulary is not byte-level, so the first space divides.
            match line.split_once(' ') {
                Some((left, right)) if !left.is_empty() && !right.is_empty() && !right.contains(' ') => {
                    merges.push((left.to_string(), right.to_string()));
                }
                _ => {
                    return Err(
                        self.wrong(format!("merge {rank} is {line:?}, expected two tokens and a space between"))
                    );
                }
            }
        }
        BPE::builder()
            .vocab_and_merges(vocab, merges)
            .cache_capacity(WORD_CACHE_COUNT)
            .ignore_merges(style.ignores_merges())
            .build()
            .map_err(|problem| self.wrong(format!("merges: {problem}")))
    }

    fn wrong(&self, problem: String) -> ModelError {
        let path: PathBuf = self.gguf.path().to_path_buf();
        ModelError::Tokenizer { path, problem }
    }
}

/// The bytes of every token. Ordinary tokens are spelled in the byte alphabet, special ones as they are.
fn pieces(tokens: &[&str], kinds: &[i64]) -> Pieces {
    let mut bytes = Vec::with_capacity(tokens.iter().map(|token| token.len()).sum());
    let mut ends = Vec::with_capacity(tokens.len() + 1);
    ends.push(0);
    let inverse = ByteAlphabet::new();
    for (&token, &kind) in tokens.iter().zip(kinds) {
        match kind {
            KIND_UNKNOWN | KIND_CONTROL | KIND_USER_DEFINED => bytes.extend_from_slice(token.as_bytes()),
            _ => inverse.decode(token, &mut bytes),
        }
        ends.push(bytes.len());
    }
    let control = kinds.iter().map(|kind| matches!(*kind, KIND_UNKNOWN | KIND_CONTROL)).collect();
    Pieces { bytes, ends, control }
}

/// GPT-2's alphabet: printable Latin-1 stands for itself, the other 68 bytes follow from U+0100 on in order.
fn byte_to_char(byte: u8) -> char {
    let offset = match byte {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => return char::from(byte),
        0..=0x20 => u32::from(byte),
        0x7f..=0xa0 => u32::from(byte) - 0x7f + 33,
        0xad => 67,
    };
    char::from_u32(0x100 + offset).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// [`byte_to_char`] the other way round.
struct ByteAlphabet([Option<u8>; 0x144]);

impl ByteAlphabet {
    fn new() -> Self {
        let mut table = [None; 0x144];
        for byte in 0..=u8::MAX {
            table[byte_to_char(byte) as usize] = Some(byte);
        }
        Self(table)
    }

    /// Characters outside the alphabet stand for themselves.
    fn decode(&self, token: &str, bytes: &mut Vec<u8>) {
        for character in token.chars() {
            match self.0.get(character as usize).copied().flatten() {
                Some(byte) => bytes.push(byte),
                None => bytes.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_alphabet_is_gpt2s_and_can_be_inverted() {
        let published = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet();
        let ours: std::collections::HashSet<char> = (0..=u8::MAX).map(byte_to_char).collect();
        assert_eq!(ours.len(), 256);
        assert!(published.iter().all(|character| ours.contains(character)));
        let alphabet = ByteAlphabet::new();
        for byte in 0..=u8::MAX {
            let mut back = Vec::new();
            alphabet.decode(&byte_to_char(byte).to_string(), &mut back);
            assert_eq!(back, [byte]);
        }
        assert_eq!((byte_to_char(b' '), byte_to_char(b'\n')), ('Ġ', 'Ċ'));
    }
}
