//! Small GGUF files with random weights: models that load, tokenize and chat like real ones, in a few hundred kilobytes.

use std::io;
use std::path::Path;

pub use forebay::model::gguf::{GgufWriter, Meta};
use half::f16;

/// The ChatML template, as SmolLM2 and Qwen2 carry it.
pub const CHAT_TEMPLATE: &str = "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
/// The control tokens, ids 0 to 2.
pub const SPECIALS: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
/// Merges in the byte alphabet (`Ġ` is a space), most frequent first.
const MERGES: [&str; 42] = [
    "Ġ t", "Ġ a", "i n", "h e", "r e", "o n", "e r", "Ġt he", "a t", "Ġ s", "Ġ o", "e n", "Ġ c", "e s", "Ġ w", "n d",
    "i t", "o r", "i s", "a l", "Ġ p", "in g", "Ġ f", "o u", "Ġo f", "Ġ in", "Ġa nd", "Ġ b", "a n", "e d", "l l",
    "Ġ m", "Ġt o", "a r", "Ġ h", "o m", "Ġ d", "r o", "Ġ is", "l e", "u s", "Ġ n",
];

/// Which architecture the file claims.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TinyArch {
    /// `llama`, with `pre=smollm`.
    Llama,
    /// `qwen2`, with biases and `pre=qwen2`.
    Qwen2,
}

/// How the matrices are stored. Norms and biases are always F32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(non_camel_case_types, reason = "the field's own names")]
pub enum TinyType {
    /// 4 bytes a value.
    F32,
    /// 2 bytes a value.
    F16,
    /// 34 bytes per 32 values.
    Q8_0,
    /// 18 bytes per 32 values.
    Q4_0,
    /// 20 bytes per 32 values.
    Q4_1,
}

impl TinyType {
    /// Every type.
    pub const ALL: [Self; 5] = [Self::F32, Self::F16, Self::Q8_0, Self::Q4_0, Self::Q4_1];

    /// The number that stands for the type in a GGUF file.
    pub fn code(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q4_1 => 3,
            Self::Q8_0 => 8,
        }
    }

    /// Stores values; for the block types their count is a multiple of 32.
    pub fn encode(self, values: &[f32]) -> Vec<u8> {
        let half = |value: f32| f16::from_f32(value).to_le_bytes();
        let mut bytes = Vec::with_capacity(values.len() * 4);
        match self {
            Self::F32 => values.iter().for_each(|value| bytes.extend(value.to_le_bytes())),
            Self::F16 => values.iter().for_each(|&value| bytes.extend(half(value))),
            Self::Q8_0 | Self::Q4_0 | Self::Q4_1 => {
                assert_eq!(values.len() % 32, 0, "a row is whole blocks of 32");
                values.chunks_exact(32).for_each(|block| self.encode_block(block, &mut bytes));
            }
        }
        bytes
    }

    fn encode_block(self, block: &[f32], bytes: &mut Vec<u8>) {
        let half = |value: f32| f16::from_f32(value);
        let largest = block.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
        let (low, high) =
            block.iter().fold((f32::MAX, f32::MIN), |(low, high), &value| (low.min(value), high.max(value)));
        let quant = |value: f32, scale: f16, offset: f32, limit: f32| match scale.to_f32() {
            0.0 => offset.clamp(0.0, limit) as u8,
            scale => (value / scale + offset).round().clamp(0.0, limit) as u8,
        };
        if self == Self::Q8_0 {
            let scale = half(largest / 127.0);
            bytes.extend(scale.to_le_bytes());
            bytes.extend(block.iter().map(|&value| quant(value, scale, 128.0, 255.0).wrapping_sub(128)));
            return;
        }
        let nibbles: Vec<u8> = if self == Self::Q4_0 {
            let scale = half(largest / 7.0);
            bytes.extend(scale.to_le_bytes());
            block.iter().map(|&value| quant(value, scale, 8.0, 15.0)).collect()
        } else {
            let (scale, least) = (half((high - low) / 15.0), half(low));
            bytes.extend(scale.to_le_bytes());
            bytes.extend(least.to_le_bytes());
            block.iter().map(|&value| quant(value - least.to_f32(), scale, 0.0, 15.0)).collect()
        };
        bytes.extend((0..16).map(|at| nibbles[at] | nibbles[at + 16] << 4));
    }
}

/// The shape of a tiny model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TinyModel {
    /// The architecture.
    pub arch: TinyArch,
    /// How the matrices are stored.
    pub dtype: TinyType,
    /// Transformer layers.
    pub layers: usize,
    /// Width of the residual stream; a multiple of 32.
    pub embed: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Values per head; `heads * head_dim` is a multiple of 32.
    pub head_dim: usize,
    /// Width of the feed-forward layer; a multiple of 32.
    pub ffn: usize,
    /// Context length that the metadata states.
    pub context: usize,
    /// Whether the output matrix is the token embedding.
    pub tied_output: bool,
    /// Of the random weights.
    pub seed: u64,
}

impl Default for TinyModel {
    fn default() -> Self {
        Self {
            arch: TinyArch::Llama,
            dtype: TinyType::F32,
            layers: 2,
            embed: 64,
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            ffn: 128,
            context: 4096,
            tied_output: true,
            seed: 1,
        }
    }
}

/// Writes a whole model: metadata, tokenizer, chat template and random weights.
pub fn write_tiny_model(path: &Path, model: &TinyModel) -> io::Result<()> {
    std::fs::write(path, tiny_model(model).finish())
}

/// The same, open to changes before [`GgufWriter::finish`].
pub fn tiny_model(model: &TinyModel) -> GgufWriter {
    let (name, pre) = match model.arch {
        TinyArch::Llama => ("llama", "smollm"),
        TinyArch::Qwen2 => ("qwen2", "qwen2"),
    };
    let tokens = tokens();
    let kinds: Vec<i32> = (0..tokens.len()).map(|id| if id < SPECIALS.len() { 3 } else { 1 }).collect();
    let mut file = GgufWriter::new();
    file.set("general.architecture", Meta::Text(name.into()));
    file.set("general.name", Meta::Text("tiny".into()));
    for (key, value) in [
        ("block_count", model.layers),
        ("context_length", model.context),
        ("embedding_length", model.embed),
        ("feed_forward_length", model.ffn),
        ("attention.head_count", model.heads),
        ("attention.head_count_kv", model.kv_heads),
        ("attention.key_length", model.head_dim),
        ("attention.value_length", model.head_dim),
        ("rope.dimension_count", model.head_dim),
        ("vocab_size", tokens.len()),
    ] {
        file.set(&format!("{name}.{key}"), Meta::U32(value as u32));
    }
    file.set(&format!("{name}.rope.freq_base"), Meta::F32(10_000.0));
    file.set(&format!("{name}.attention.layer_norm_rms_epsilon"), Meta::F32(1e-5));
    file.set("tokenizer.ggml.model", Meta::Text("gpt2".into()));
    file.set("tokenizer.ggml.pre", Meta::Text(pre.into()));
    file.set("tokenizer.ggml.merges", Meta::Texts(MERGES.map(String::from).to_vec()));
    file.set("tokenizer.ggml.token_type", Meta::I32s(kinds));
    file.set("tokenizer.ggml.bos_token_id", Meta::U32(0));
    file.set("tokenizer.ggml.eos_token_id", Meta::U32(2));
    file.set("tokenizer.ggml.add_bos_token", Meta::Bool(false));
    file.set("tokenizer.chat_template", Meta::Text(CHAT_TEMPLATE.into()));
    weights(&mut file, model, tokens.len());
    file.set("tokenizer.ggml.tokens", Meta::Texts(tokens));
    file
}

fn weights(file: &mut GgufWriter, model: &TinyModel, vocab: usize) {
    let mut random = Random(model.seed);
    let (q, kv) = (model.heads * model.head_dim, model.kv_heads * model.head_dim);
    let mut matrix = |file: &mut GgufWriter, name: String, rows: usize, cols: usize, gain: f32| {
        let scale = gain / (cols as f32).sqrt();
        let values: Vec<f32> = (0..rows * cols).map(|_| scale * random.normal()).collect();
        file.tensor(&name, &[cols as u64, rows as u64], model.dtype.code(), model.dtype.encode(&values));
    };
    // Embeddings of unit size and queries of some gain keep attention from being flat and the next token from being always the same.
    matrix(file, "token_embd.weight".into(), vocab, model.embed, 8.0);
    if !model.tied_output {
        matrix(file, "output.weight".into(), vocab, model.embed, 1.0);
    }
    for layer in 0..model.layers {
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        matrix(file, name("attn_q"), q, model.embed, 2.0);
        matrix(file, name("attn_k"), kv, model.embed, 2.0);
        matrix(file, name("attn_v"), kv, model.embed, 1.0);
        matrix(file, name("attn_output"), model.embed, q, 1.0);
        matrix(file, name("ffn_gate"), model.ffn, model.embed, 1.0);
        matrix(file, name("ffn_up"), model.ffn, model.embed, 1.0);
        matrix(file, name("ffn_down"), model.embed, model.ffn, 1.0);
    }
    let mut vector = |file: &mut GgufWriter, name: String, length: usize, centre: f32| {
        let values: Vec<f32> = (0..length).map(|_| centre + 0.1 * random.normal()).collect();
        file.tensor(&name, &[length as u64], TinyType::F32.code(), TinyType::F32.encode(&values));
    };
    vector(file, "output_norm.weight".into(), model.embed, 1.0);
    for layer in 0..model.layers {
        vector(file, format!("blk.{layer}.attn_norm.weight"), model.embed, 1.0);
        vector(file, format!("blk.{layer}.ffn_norm.weight"), model.embed, 1.0);
        if model.arch == TinyArch::Qwen2 {
            vector(file, format!("blk.{layer}.attn_q.bias"), q, 0.0);
            vector(file, format!("blk.{layer}.attn_k.bias"), kv, 0.0);
            vector(file, format!("blk.{layer}.attn_v.bias"), kv, 0.0);
        }
    }
}

/// The vocabulary: control tokens, the 256 bytes, what the merges make.
pub fn tokens() -> Vec<String> {
    let mut tokens: Vec<String> = SPECIALS.map(String::from).to_vec();
    let mut beyond = 0x100;
    for byte in 0..=255u8 {
        let printable = matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
        let code = if printable { u32::from(byte) } else { beyond };
        beyond += u32::from(!printable);
        tokens.extend(char::from_u32(code).map(String::from));
    }
    tokens.extend(MERGES.iter().map(|merge| merge.replace(' ', "")));
    tokens
}

/// SplitMix64: enough for weights, and the same everywhere.
#[derive(Debug, Clone)]
pub struct Random(pub u64);

impl Random {
    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    /// A number below `limit`, which is above 0.
    pub fn below(&mut self, limit: usize) -> usize {
        (self.bits() % limit as u64) as usize
    }

    /// Nearly normal: the sum of four uniform numbers, of variance 1.
    pub fn normal(&mut self) -> f32 {
        let sum: f32 = (0..4).map(|_| (self.bits() >> 40) as f32 / (1u64 << 24) as f32).sum();
        (sum - 2.0) * 3.0f32.sqrt()
    }
}
