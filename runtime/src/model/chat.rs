//! Chat templates: Jinja, as model files carry them.
//!
//! What a message says must not become structure. [`encode_chat`] renders the template once, with the messages' own spellings of special
//! tokens disguised, finds the special tokens of what the template wrote, and only then lifts the disguise. Where no message spells
//! a special token nothing is disguised, and the tokens are those of plain rendering.

use std::collections::HashSet;

use minijinja::value::{Kwargs, Value};
use minijinja::{Environment, Error, ErrorKind, context};
use serde::{Deserialize, Serialize};

use super::error::{ModelError, Result};
use super::gguf::Gguf;
use super::tokenizer::Tokenizer;

/// Published templates are below 16 KiB.
const TEMPLATE_BYTES_MAX: usize = 1 << 20;
/// Steps of the template's virtual machine; a template that loops without end stops here. Rendering takes some ten per message.
const TEMPLATE_STEPS_MAX: u64 = 10_000_000;
/// For models without a template.
const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
const NAME: &str = "chat";

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant` or another role that the template knows; lower-case letters and underscores.
    pub role: String,
    /// What is said.
    pub content: String,
}

impl Message {
    /// A message of the given role.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into() }
    }
}

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    bos: String,
    eos: String,
}

impl ChatTemplate {
    /// Compiles `tokenizer.chat_template`; a model without one gets ChatML, and the log says so.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self> {
        let source = match gguf.string("tokenizer.chat_template")? {
            Some(source) => source,
            None => {
                log::warn!("{}: the file has no chat template, taking ChatML", gguf.path().display());
                CHATML
            }
        };
        let tokens = gguf.strings("tokenizer.ggml.tokens")?.unwrap_or_default();
        let text = |key: &str| -> Result<String> {
            let id = gguf.unsigned(key)?.and_then(|id| usize::try_from(id).ok());
            Ok(id.and_then(|id| tokens.get(id)).copied().unwrap_or_default().to_string())
        };
        Self::new(source, &text("tokenizer.ggml.bos_token_id")?, &text("tokenizer.ggml.eos_token_id")?)
    }

    /// Compiles a template. `bos` and `eos` are what it sees as `bos_token` and `eos_token`.
    pub fn new(source: &str, bos: &str, eos: &str) -> Result<Self> {
        if source.len() > TEMPLATE_BYTES_MAX {
            let found = source.len();
            return Err(ModelError::Template(format!("{found} bytes long, expected at most {TEMPLATE_BYTES_MAX}")));
        }
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_fuel(Some(TEMPLATE_STEPS_MAX));
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.add_filter("tojson", to_json);
        environment.add_template_owned(NAME, source.to_string()).map_err(|error| problem(&error))?;
        Ok(Self { environment, source: source.to_string(), bos: bos.to_string(), eos: eos.to_string() })
    }

    /// The conversation as the model was trained to see it. With `add_generation_prompt` it ends where the answer begins.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        for message in messages {
            let plain = |byte: u8| byte.is_ascii_lowercase() || byte == b'_';
            if message.role.is_empty() || !message.role.bytes().all(plain) {
                let role = &message.role;
                return Err(ModelError::Template(format!(
                    "role {role:?}, expected lower-case letters and underscores"
                )));
            }
        }
        let template = self.environment.get_template(NAME).map_err(|error| problem(&error))?;
        let values = context! {
            messages => messages,
            add_generation_prompt => add_generation_prompt,
            bos_token => self.bos,
            eos_token => self.eos,
            tools => Value::from(()),
            documents => Value::from(()),
        };
        template.render(values).map_err(|error| problem(&error))
    }
}

/// The tokens of a conversation, with a begin-of-text token where the model wants one. Special tokens come from the template alone: a
/// message that spells one is encoded as text.
pub fn encode_chat(
    template: &ChatTemplate,
    tokenizer: &Tokenizer,
    messages: &[Message],
    add_generation_prompt: bool,
) -> Result<Vec<u32>> {
    let mut disguise = Disguise::new(template, tokenizer, messages);
    let disguised = messages
        .iter()
        .map(|message| Ok(Message::new(&message.role, disguise.put_on(&message.content)?)))
        .collect::<Result<Vec<_>>>()?;
    let text = template.render(&disguised, add_generation_prompt)?;
    let mut tokens = tokenizer
        .encode_with_special(&text, |plain, tokens| tokenizer.encode_plain(&disguise.take_off(plain), tokens))?;
    tokenizer.prepend_bos(&mut tokens);
    Ok(tokens)
}

/// Replaces the first character of every special token that a message spells by a private-use character that occurs nowhere else.
struct Disguise<'a> {
    tokenizer: &'a Tokenizer,
    /// Private-use characters of the template and the messages: not free to stand for something else.
    taken: HashSet<char>,
    /// Real character and its stand-in.
    pairs: Vec<(char, char)>,
}

impl<'a> Disguise<'a> {
    fn new(template: &ChatTemplate, tokenizer: &'a Tokenizer, messages: &[Message]) -> Self {
        let texts = messages.iter().map(|message| message.content.as_str()).chain([template.source.as_str()]);
        let private = |character: &char| STAND_INS.contains(character);
        let taken = texts.chain(tokenizer.special_texts()).flat_map(str::chars).filter(private).collect();
        Self { tokenizer, taken, pairs: Vec::new() }
    }

    fn put_on(&mut self, content: &str) -> Result<String> {
        let Some(matcher) = self.tokenizer.special_matcher() else {
            return Ok(content.to_string());
        };
        let mut places = HashSet::new();
        let mut start = 0;
        // The search goes on one character after each find: a special token may begin inside another's spelling.
        while let Some(found) = matcher.find(&content[start..]) {
            let at = start + found.start();
            places.insert(at);
            start = at + content[at..].chars().next().map_or(1, char::len_utf8);
        }
        self.edges(content, &mut places);
        let mut disguised = String::with_capacity(content.len());
        for (at, character) in content.char_indices() {
            disguised.push(if places.contains(&at) { self.stand_in(character)? } else { character });
        }
        Ok(disguised)
    }

    /// A message that ends in the beginning of a special token, or begins with the end of one, could complete it with what the template
    /// writes beside it. The template may trim the message first.
    fn edges(&self, content: &str, places: &mut HashSet<usize>) {
        let tail = content.trim_end();
        let head_start = content.len() - content.trim_start().len();
        let head = &content[head_start..];
        for special in self.tokenizer.special_texts() {
            for (cut, _) in special.char_indices().skip(1) {
                if tail.ends_with(&special[..cut]) {
                    places.insert(tail.len() - cut);
                }
                if head.starts_with(&special[cut..]) {
                    places.insert(head_start);
                }
            }
        }
    }

    fn stand_in(&mut self, real: char) -> Result<char> {
        if let Some((_, stand_in)) = self.pairs.iter().find(|(known, _)| *known == real) {
            return Ok(*stand_in);
        }
        let Some(stand_in) = STAND_INS.into_iter().find(|free| !self.taken.contains(free)) else {
            return Err(ModelError::Template("the messages use every private-use character of plane 15".to_string()));
        };
        self.taken.insert(stand_in);
        self.pairs.push((real, stand_in));
        Ok(stand_in)
    }

    fn take_off(&self, text: &str) -> String {
        let real =
            |character| self.pairs.iter().find(|(_, stand_in)| *stand_in == character).map_or(character, |pair| pair.0);
        match self.pairs.is_empty() {
            true => text.to_string(),
            false => text.chars().map(real).collect(),
        }
    }
}

/// The private-use characters of plane 15.
const STAND_INS: std::ops::RangeInclusive<char> = '\u{f0000}'..='\u{ffffd}';

fn problem(error: &Error) -> ModelError {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    ModelError::Template(text.replace('\n', " "))
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

/// The current date and time in UTC, formatted as `strftime` does.
fn strftime_now(format: &str) -> Result<String, Error> {
    let now = jiff::Timestamp::now().to_zoned(jiff::tz::TimeZone::UTC);
    jiff::fmt::strtime::format(format, &now).map_err(|error| Error::new(ErrorKind::InvalidOperation, error.to_string()))
}

/// JSON as Python writes it for templates: nothing escaped for HTML.
fn to_json(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    // Escaping of other characters, separators and key order are as they come.
    let _: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let bad = |error: serde_json::Error| Error::new(ErrorKind::BadSerialization, error.to_string());
    let Some(indent) = indent else {
        return serde_json::to_string(value).map_err(bad);
    };
    let spaces = " ".repeat(indent.min(16));
    let mut bytes = Vec::new();
    let formatter = serde_json::ser::PrettyFormatter::with_indent(spaces.as_bytes());
    value.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, formatter)).map_err(bad)?;
    String::from_utf8(bytes).map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))
}
