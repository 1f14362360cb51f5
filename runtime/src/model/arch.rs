//! What a model's metadata says about its shape, checked against sane bounds and against the tensors.

use super::error::{ModelError, Result};
use super::gguf::{Gguf, Value};
pub use forebay_kernels::rope::RopeStyle;

/// Bounds above every published model; beyond them a number is damage, and products of two of them cannot overflow.
const LAYERS_MAX: u64 = 1 << 10;
const HEADS_MAX: u64 = 1 << 10;
const HEAD_DIM_MAX: u64 = 1 << 10;
const WIDTH_MAX: u64 = 1 << 20;
const VOCAB_MAX: u64 = 1 << 22;
const CONTEXT_MAX: u64 = 1 << 27;
/// llama.cpp's default where a file does not say.
const ROPE_BASE_DEFAULT: f64 = 10_000.0;
/// The tensor of per-frequency divisors that Llama 3.1 and later carry.
const ROPE_FACTORS: &str = "rope_freqs.weight";

/// The architectures that are implemented.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Architecture {
    /// Llama and what shares its shape: SmolLM2, TinyLlama, Mistral.
    Llama,
    /// Qwen2 and Qwen2.5: Llama with biases on Q, K and V.
    Qwen2,
}

impl Architecture {
    /// Every architecture.
    pub const ALL: [Self; 2] = [Self::Llama, Self::Qwen2];

    /// The value of `general.architecture`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
        }
    }
}

/// The shape and constants of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// The architecture.
    pub architecture: Architecture,
    /// `general.name`, or the architecture's name.
    pub name: String,
    /// Transformer layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub embed: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`.
    pub kv_heads: usize,
    /// Values per head.
    pub head_dim: usize,
    /// Width of the feed-forward layer.
    pub ffn: usize,
    /// Tokens in the vocabulary.
    pub vocab: usize,
    /// Tokens the model was trained to attend over.
    pub context: usize,
    /// Base of the rotary frequencies.
    pub rope_base: f32,
    /// Leading values of a head that are rotated; even, at most `head_dim`.
    pub rope_dims: usize,
    /// Which values are rotated together.
    pub rope_style: RopeStyle,
    /// Name of the tensor `[rope_dims / 2]` whose values divide the rotary frequencies, if the model has one.
    pub rope_freq_factors: Option<String>,
    /// What positions are multiplied by: 1, or 1/factor under linear scaling.
    pub rope_scale: f32,
    /// Epsilon of the RMS norms.
    pub norm_eps: f32,
    /// Whether Q, K and V have biases.
    pub qkv_bias: bool,
    /// Whether the output matrix is the token embedding.
    pub tied_output: bool,
}

impl ModelConfig {
    /// Reads and checks the metadata. Tensor shapes are checked where tensors are looked up.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self> {
        let keys = Keys { gguf, prefix: architecture_name(gguf)? };
        let architecture = keys.architecture()?;
        keys.refuse_unsupported()?;

        let embed = keys.count("embedding_length", WIDTH_MAX)?;
        let heads = keys.count("attention.head_count", HEADS_MAX)?;
        let kv_heads = keys.count_or("attention.head_count_kv", HEADS_MAX, heads)?;
        if heads % kv_heads != 0 {
            return Err(keys.wrong(
                "attention.head_count_kv",
                kv_heads,
                format!("a divisor of the {heads} query heads"),
            ));
        }
        if !embed.is_multiple_of(heads) && keys.number("attention.key_length")?.is_none() {
            return Err(keys.wrong("embedding_length", embed, format!("a multiple of the {heads} query heads")));
        }
        let head_dim = keys.count_or("attention.key_length", HEAD_DIM_MAX, embed / heads)?;
        if head_dim == 0 || head_dim % 2 != 0 || head_dim as u64 > HEAD_DIM_MAX {
            return Err(keys.wrong("attention.key_length", head_dim, format!("even, 2 to {HEAD_DIM_MAX}")));
        }
        let value_dim = keys.count_or("attention.value_length", HEAD_DIM_MAX, head_dim)?;
        if value_dim != head_dim {
            return Err(keys.wrong("attention.value_length", value_dim, format!("{head_dim}, as long as a key")));
        }
        let rope_dims = keys.count_or("rope.dimension_count", HEAD_DIM_MAX, head_dim)?;
        if rope_dims % 2 != 0 || rope_dims > head_dim {
            return Err(keys.wrong("rope.dimension_count", rope_dims, format!("even, at most {head_dim}")));
        }
        let rope_base = keys.float_or("rope.freq_base", ROPE_BASE_DEFAULT)?;
        if !(rope_base > 1.0 && rope_base <= 1e12) {
            return Err(keys.wrong("rope.freq_base", rope_base, "above 1, at most 1e12"));
        }
        let norm_key = "attention.layer_norm_rms_epsilon";
        let Some(norm_eps) = keys.float(norm_key)? else {
            return Err(keys.missing(norm_key, "the epsilon of the RMS norms"));
        };
        if !(norm_eps > 0.0 && norm_eps < 0.1) {
            return Err(keys.wrong(norm_key, norm_eps, "above 0, below 0.1"));
        }

        Ok(Self {
            architecture,
            name: gguf.string("general.name")?.unwrap_or(keys.prefix).to_string(),
            layers: keys.count("block_count", LAYERS_MAX)?,
            embed,
            heads,
            kv_heads,
            head_dim,
            ffn: keys.count("feed_forward_length", WIDTH_MAX)?,
            vocab: keys.vocab()?,
            context: keys.count("context_length", CONTEXT_MAX)?,
            rope_base: rope_base as f32,
            rope_dims,
            rope_style: match architecture {
                Architecture::Llama => RopeStyle::Interleaved,
                Architecture::Qwen2 => RopeStyle::Halves,
            },
            rope_freq_factors: gguf.tensor(ROPE_FACTORS).map(|tensor| tensor.name.clone()),
            rope_scale: keys.rope_scale()?,
            norm_eps: norm_eps as f32,
            qkv_bias: architecture == Architecture::Qwen2 || gguf.tensor("blk.0.attn_q.bias").is_some(),
            tied_output: gguf.tensor("output.weight").is_none(),
        })
    }

    /// Width of the queries of all heads: `heads * head_dim`.
    pub fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Width of the keys, or of the values, of all key/value heads: `kv_heads * head_dim`.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }
}

fn architecture_name(gguf: &Gguf) -> Result<&str> {
    match gguf.string("general.architecture")? {
        Some(name) => Ok(name),
        None => Err(ModelError::MissingKey {
            path: gguf.path().to_path_buf(),
            key: "general.architecture".to_string(),
            expected: "the name of the architecture",
        }),
    }
}

/// The metadata of one architecture: keys under its prefix.
struct Keys<'a> {
    gguf: &'a Gguf,
    prefix: &'a str,
}

impl Keys<'_> {
    fn architecture(&self) -> Result<Architecture> {
        if let Some(found) = Architecture::ALL.into_iter().find(|known| known.name() == self.prefix) {
            return Ok(found);
        }
        Err(ModelError::Architecture {
            path: self.gguf.path().to_path_buf(),
            found: self.prefix.to_string(),
            supported: Architecture::ALL.map(Architecture::name).join(", "),
        })
    }

    /// What a file of a known architecture can ask for that is not implemented: computing without it would be silently wrong.
    fn refuse_unsupported(&self) -> Result<()> {
        for (key, what) in [
            ("expert_count", "0: mixtures of experts are not supported"),
            ("attention.sliding_window", "absent: attention over a window is not supported"),
        ] {
            if let Some(found) = self.number(key)?
                && found > 0
            {
                return Err(self.wrong(key, found, what));
            }
        }
        Ok(())
    }

    fn rope_scale(&self) -> Result<f32> {
        let kind = self.gguf.string(&self.full("rope.scaling.type"))?.unwrap_or("linear");
        let factor = match self.float("rope.scaling.factor")? {
            Some(factor) => factor,
            None => self.float_or("rope.scale_linear", 1.0)?,
        };
        match kind {
            "none" => Ok(1.0),
            "linear" if factor == 0.0 => Ok(1.0),
            "linear" if factor.is_finite() && (1e-3..=1e6).contains(&factor) => Ok((1.0 / factor) as f32),
            "linear" => Err(self.wrong("rope.scaling.factor", factor, "0.001 to 1e6")),
            other => Err(self.wrong("rope.scaling.type", format!("{other:?}"), "\"none\" or \"linear\"")),
        }
    }

    /// The vocabulary's size is the number of tokens that the file has; `vocab_size` must say the same.
    fn vocab(&self) -> Result<usize> {
        let tokens = match self.gguf.value("tokenizer.ggml.tokens") {
            Some(Value::Array(array)) => array.count,
            _ => self.count("vocab_size", VOCAB_MAX)?,
        };
        if tokens == 0 || tokens as u64 > VOCAB_MAX {
            return Err(self.wrong("vocab_size", tokens, format!("1 to {VOCAB_MAX}")));
        }
        let said = self.count_or("vocab_size", VOCAB_MAX, tokens)?;
        if said != tokens {
            return Err(self.wrong("vocab_size", said, format!("{tokens}, the length of tokenizer.ggml.tokens")));
        }
        Ok(tokens)
    }

    fn full(&self, key: &str) -> String {
        format!("{}.{key}", self.prefix)
    }

    fn number(&self, key: &str) -> Result<Option<u64>> {
        let full = self.full(key);
        // Some writers give a count per layer; only the same count everywhere is implemented.
        if let Some(Value::Array(_)) = self.gguf.value(&full) {
            let per_layer = self.gguf.integers(&full)?.unwrap_or_default();
            return match per_layer.first() {
                Some(&first) if first >= 0 && per_layer.iter().all(|&each| each == first) => Ok(Some(first as u64)),
                _ => Err(self.wrong(key, "a list of different numbers", "the same number for every layer")),
            };
        }
        self.gguf.unsigned(&full)
    }

    fn count(&self, key: &str, limit: u64) -> Result<usize> {
        match self.number(key)? {
            Some(found) if (1..=limit).contains(&found) => Ok(found as usize),
            Some(found) => Err(self.wrong(key, found, format!("1 to {limit}"))),
            None => Err(self.missing(key, "a count above 0")),
        }
    }

    fn count_or(&self, key: &str, limit: u64, default: usize) -> Result<usize> {
        match self.number(key)? {
            Some(_) => self.count(key, limit),
            None => Ok(default),
        }
    }

    fn float(&self, key: &str) -> Result<Option<f64>> {
        self.gguf.float(&self.full(key))
    }

    fn float_or(&self, key: &str, default: f64) -> Result<f64> {
        Ok(self.float(key)?.unwrap_or(default))
    }

    fn missing(&self, key: &str, expected: &'static str) -> ModelError {
        ModelError::MissingKey { path: self.gguf.path().to_path_buf(), key: self.full(key), expected }
    }

    fn wrong(&self, key: &str, found: impl std::fmt::Display, expected: impl Into<String>) -> ModelError {
        ModelError::KeyValue {
            path: self.gguf.path().to_path_buf(),
            key: self.full(key),
            found: found.to_string(),
            expected: expected.into(),
        }
    }
}
