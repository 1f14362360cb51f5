//! Models of random weights in the shapes of published ones, to measure speed where the file is not at hand.

use clap::ValueEnum;
use forebay::Error;
use forebay::model::Model;
use forebay::model::gguf::{Gguf, GgufWriter, Meta, type_code};
use forebay_kernels::WeightType;
use half::f16;
use std::path::Path;

/// Shapes, from the `config.json` of the models of these names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs, reason = "the names are the documentation")]
pub enum Synthetic {
    #[value(name = "smollm2-135m")]
    SmolLm2_135M,
    #[value(name = "qwen2.5-0.5b")]
    Qwen25_05B,
    #[value(name = "qwen2.5-1.5b")]
    Qwen25_15B,
    #[value(name = "qwen2.5-7b")]
    Qwen25_7B,
    #[value(name = "llama3.2-1b")]
    Llama32_1B,
    #[value(name = "llama3.2-3b")]
    Llama32_3B,
    #[value(name = "llama3-8b")]
    Llama3_8B,
    #[value(name = "mistral-7b")]
    Mistral7B,
}

/// What a shape consists of.
struct Shape {
    architecture: &'static str,
    layers: usize,
    embed: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    ffn: usize,
    vocab: usize,
    tied_output: bool,
    rope_base: f32,
    context: usize,
}

/// How all matrices are stored.
const DTYPE: WeightType = WeightType::Q4_0;

impl Synthetic {
    fn shape(self) -> Shape {
        let shape = |architecture, [layers, embed, heads, kv_heads, head_dim, ffn, vocab, context]: [usize; 8]| Shape {
            architecture,
            layers,
            embed,
            heads,
            kv_heads,
            head_dim,
            ffn,
            vocab,
            tied_output: true,
            rope_base: 500_000.0,
            context,
        };
        match self {
            Self::SmolLm2_135M => {
                Shape { rope_base: 100_000.0, ..shape("llama", [30, 576, 9, 3, 64, 1536, 49_152, 8192]) }
            }
            Self::Qwen25_05B => Shape { rope_base: 1e6, ..shape("qwen2", [24, 896, 14, 2, 64, 4864, 151_936, 32_768]) },
            Self::Qwen25_15B => {
                Shape { rope_base: 1e6, ..shape("qwen2", [28, 1536, 12, 2, 128, 8960, 151_936, 32_768]) }
            }
            Self::Qwen25_7B => Shape {
                rope_base: 1e6,
                tied_output: false,
                ..shape("qwen2", [28, 3584, 28, 4, 128, 18_944, 152_064, 131_072])
            },
            Self::Llama32_1B => shape("llama", [16, 2048, 32, 8, 64, 8192, 128_256, 131_072]),
            Self::Llama32_3B => shape("llama", [28, 3072, 24, 8, 128, 8192, 128_256, 131_072]),
            Self::Llama3_8B => {
                Shape { tied_output: false, ..shape("llama", [32, 4096, 32, 8, 128, 14_336, 128_256, 8192]) }
            }
            Self::Mistral7B => Shape {
                rope_base: 1e6,
                tied_output: false,
                ..shape("llama", [32, 4096, 32, 8, 128, 14_336, 32_768, 32_768])
            },
        }
    }

    /// Makes the model in memory, as large as its file would be: matrices of random Q4_0 weights of variance 1 / columns, norms of 1, biases of 0.
    pub fn model(self) -> Result<Model, Error> {
        let shape = self.shape();
        let name = self.to_possible_value().map(|value| value.get_name().to_string()).unwrap_or_default();
        let mut file = head(&shape, &format!("synthetic {name}"));
        tensors(&mut file, &shape);
        let mut seed = 1;
        let bytes = file.finish_with(|tensor, out| {
            if tensor.code == type_code(DTYPE) {
                seed = random_weights(seed, tensor.dims[0] as usize, out);
            } else if !tensor.name.ends_with(".bias") {
                out.chunks_exact_mut(4).for_each(|value| value.copy_from_slice(&1f32.to_le_bytes()));
            }
        });
        Ok(Model::from_gguf(Gguf::from_bytes(Path::new(&name), bytes)?)?)
    }
}

/// Metadata, with a vocabulary of as many tokens as the model has.
fn head(shape: &Shape, name: &str) -> GgufWriter {
    let mut file = GgufWriter::new();
    let architecture = shape.architecture;
    file.set("general.architecture", Meta::Text(architecture.into()));
    file.set("general.name", Meta::Text(name.into()));
    for (key, value) in [
        ("block_count", shape.layers),
        ("context_length", shape.context),
        ("embedding_length", shape.embed),
        ("feed_forward_length", shape.ffn),
        ("attention.head_count", shape.heads),
        ("attention.head_count_kv", shape.kv_heads),
        ("attention.key_length", shape.head_dim),
        ("attention.value_length", shape.head_dim),
        ("rope.dimension_count", shape.head_dim),
    ] {
        file.set(&format!("{architecture}.{key}"), Meta::U32(value as u32));
    }
    file.set(&format!("{architecture}.rope.freq_base"), Meta::F32(shape.rope_base));
    file.set(&format!("{architecture}.attention.layer_norm_rms_epsilon"), Meta::F32(1e-6));
    file.set("tokenizer.ggml.model", Meta::Text("gpt2".into()));
    file.set("tokenizer.ggml.pre", Meta::Text("qwen2".into()));
    file.set("tokenizer.ggml.tokens", Meta::Texts((0..shape.vocab).map(|id| format!("<{id}>")).collect()));
    file.set("tokenizer.ggml.token_type", Meta::I32s(vec![1; shape.vocab]));
    file.set("tokenizer.ggml.merges", Meta::Texts(Vec::new()));
    file.set("tokenizer.ggml.eos_token_id", Meta::U32(0));
    file
}

fn tensors(file: &mut GgufWriter, shape: &Shape) {
    let matrix = |file: &mut GgufWriter, name: &str, rows: usize, cols: usize| {
        let size = rows * DTYPE.row_bytes(cols).unwrap_or_default();
        file.announce(name, &[cols as u64, rows as u64], type_code(DTYPE), size);
    };
    let vector = |file: &mut GgufWriter, name: &str, length: usize| {
        file.announce(name, &[length as u64], type_code(WeightType::F32), 4 * length);
    };
    let (q, kv) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
    matrix(file, "token_embd.weight", shape.vocab, shape.embed);
    if !shape.tied_output {
        matrix(file, "output.weight", shape.vocab, shape.embed);
    }
    vector(file, "output_norm.weight", shape.embed);
    for layer in 0..shape.layers {
        let name = |part: &str| format!("blk.{layer}.{part}");
        for (part, rows, cols) in [
            ("attn_q", q, shape.embed),
            ("attn_k", kv, shape.embed),
            ("attn_v", kv, shape.embed),
            ("attn_output", shape.embed, q),
            ("ffn_gate", shape.ffn, shape.embed),
            ("ffn_up", shape.ffn, shape.embed),
            ("ffn_down", shape.embed, shape.ffn),
        ] {
            matrix(file, &name(&format!("{part}.weight")), rows, cols);
        }
        vector(file, &name("attn_norm.weight"), shape.embed);
        vector(file, &name("ffn_norm.weight"), shape.embed);
        if shape.architecture == "qwen2" {
            for (part, length) in [("attn_q.bias", q), ("attn_k.bias", kv), ("attn_v.bias", kv)] {
                vector(file, &name(part), length);
            }
        }
    }
}

/// Random Q4_0 blocks (an f16 scale and 16 bytes of codes each) of one scale. Takes a seed and returns the next.
fn random_weights(mut seed: u64, cols: usize, out: &mut [u8]) -> u64 {
    // Codes from -8 to 7, all as likely: their standard deviation.
    const DEVIATION: f32 = 4.61;
    let scale = f16::from_f32(1.0 / (DEVIATION * (cols as f32).sqrt())).to_le_bytes();
    for block in out.chunks_exact_mut(DTYPE.block_bytes()) {
        let (head, codes) = block.split_at_mut(scale.len());
        head.copy_from_slice(&scale);
        for eight in codes.chunks_exact_mut(8) {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            // The low bits of this generator repeat soon.
            eight.copy_from_slice(&(seed ^ seed >> 29).to_le_bytes());
        }
    }
    seed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_becomes_a_model_of_it() {
        let model = Synthetic::SmolLm2_135M.model().unwrap();
        let c = model.config();
        assert_eq!((c.layers, c.embed, c.heads, c.kv_heads, c.head_dim, c.ffn), (30, 576, 9, 3, 64, 1536));
        assert!(c.tied_output && c.vocab == 49_152);
        let mut row = vec![0.0; c.embed];
        forebay_kernels::dequantize_rows(forebay_kernels::Isa::Scalar, &model.layer(7).q, 5, &mut row);
        let variance = row.iter().map(|x| x * x).sum::<f32>() / row.len() as f32 * c.embed as f32;
        assert!((0.7..1.3).contains(&variance), "variance times columns is {variance}");
    }

    #[test]
    fn every_shape_is_whole() {
        for &shape in Synthetic::value_variants() {
            let Shape { embed, heads, kv_heads, head_dim, ffn, .. } = shape.shape();
            assert!(heads % kv_heads == 0 && [embed, heads * head_dim, ffn].iter().all(|n| n % 32 == 0), "{shape:?}");
        }
    }
}
