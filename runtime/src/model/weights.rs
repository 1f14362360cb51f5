//! A model: the mapped file, its shape, and its tensors, read in place.

use std::collections::HashSet;
use std::path::Path;

use forebay_kernels::{Weight, WeightType};
use half::{bf16, f16};
use sha2::{Digest, Sha256};

use super::arch::ModelConfig;
use super::error::{ModelError, Result};
use super::gguf::{Gguf, TensorInfo};

/// The longest vector (norm or bias) is as wide as the model; names of layers' tensors are `blk.{layer}.{part}`.
const EMBEDDING: &str = "token_embd.weight";
const OUTPUT: &str = "output.weight";
const OUTPUT_NORM: &str = "output_norm.weight";

/// Where a matrix lies: its place in the directory and its shape, checked once at load.
#[derive(Debug, Clone, Copy)]
struct Matrix {
    tensor: usize,
    rows: usize,
    cols: usize,
}

/// The tensors of one layer.
#[derive(Debug)]
struct Layer {
    q: Matrix,
    k: Matrix,
    v: Matrix,
    o: Matrix,
    gate: Matrix,
    up: Matrix,
    down: Matrix,
    attn_norm: Vec<f32>,
    ffn_norm: Vec<f32>,
    bias: Option<[Vec<f32>; 3]>,
}

/// One layer's weights. Matrices are `[rows = outputs][cols = inputs]`.
#[derive(Debug, Clone, Copy)]
pub struct LayerWeights<'a> {
    /// `[heads * head_dim][embed]`.
    pub q: Weight<'a>,
    /// `[kv_heads * head_dim][embed]`.
    pub k: Weight<'a>,
    /// `[kv_heads * head_dim][embed]`.
    pub v: Weight<'a>,
    /// `[embed][heads * head_dim]`.
    pub o: Weight<'a>,
    /// `[ffn][embed]`.
    pub gate: Weight<'a>,
    /// `[ffn][embed]`.
    pub up: Weight<'a>,
    /// `[embed][ffn]`.
    pub down: Weight<'a>,
    /// `[embed]`, before attention.
    pub attn_norm: &'a [f32],
    /// `[embed]`, before the feed-forward layer.
    pub ffn_norm: &'a [f32],
    /// `[heads * head_dim]`, where the model has biases.
    pub q_bias: Option<&'a [f32]>,
    /// `[kv_heads * head_dim]`, where the model has biases.
    pub k_bias: Option<&'a [f32]>,
    /// `[kv_heads * head_dim]`, where the model has biases.
    pub v_bias: Option<&'a [f32]>,
}

/// A model that is ready to compute with. Shared between sessions in an `Arc`.
#[derive(Debug)]
pub struct Model {
    gguf: Gguf,
    config: ModelConfig,
    embedding: Matrix,
    output: Matrix,
    output_norm: Vec<f32>,
    rope_freq_factors: Option<Vec<f32>>,
    layers: Vec<Layer>,
    fingerprint: [u8; 32],
}

impl Model {
    /// Opens a GGUF file, checks its metadata and every tensor, and asks the system to read it ahead.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let model = Self::from_gguf(Gguf::open(path.as_ref())?)?;
        model.gguf.read_ahead();
        Ok(model)
    }

    /// The same from a parsed file.
    pub fn from_gguf(gguf: Gguf) -> Result<Self> {
        let config = ModelConfig::from_gguf(&gguf)?;
        let mut tensors = Tensors { gguf: &gguf, used: HashSet::new() };
        let (embed, vocab) = (config.embed, config.vocab);
        let embedding = tensors.matrix(EMBEDDING, vocab, embed)?;
        let output = if config.tied_output { embedding } else { tensors.matrix(OUTPUT, vocab, embed)? };
        let output_norm = tensors.vector(OUTPUT_NORM, embed)?;
        let rope_freq_factors = match &config.rope_freq_factors {
            Some(name) => Some(tensors.frequency_factors(name, config.rope_dims / 2)?),
            None => None,
        };
        let layers = (0..config.layers).map(|layer| tensors.layer(&config, layer)).collect::<Result<Vec<_>>>()?;
        tensors.refuse_unused(&config)?;
        let fingerprint = fingerprint(&gguf, &config, &layers, &output_norm);
        Ok(Self { config, embedding, output, output_norm, rope_freq_factors, layers, fingerprint, gguf })
    }

    /// The model's shape and constants.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The file: for the tokenizer and the chat template.
    pub fn gguf(&self) -> &Gguf {
        &self.gguf
    }

    /// `[vocab][embed]`.
    pub fn token_embedding(&self) -> Weight<'_> {
        self.weight(self.embedding)
    }

    /// `[vocab][embed]`; the token embedding where the model ties them.
    pub fn output(&self) -> Weight<'_> {
        self.weight(self.output)
    }

    /// `[embed]`, before the output matrix.
    pub fn output_norm(&self) -> &[f32] {
        &self.output_norm
    }

    /// `[rope_dims / 2]`: what the rotary frequencies are divided by, where the model says.
    pub fn rope_freq_factors(&self) -> Option<&[f32]> {
        self.rope_freq_factors.as_deref()
    }

    /// The weights of layer `index`. Panics at `config().layers` and beyond.
    pub fn layer(&self, index: usize) -> LayerWeights<'_> {
        let layer = &self.layers[index];
        let bias = |which: usize| layer.bias.as_ref().map(|bias| bias[which].as_slice());
        LayerWeights {
            q: self.weight(layer.q),
            k: self.weight(layer.k),
            v: self.weight(layer.v),
            o: self.weight(layer.o),
            gate: self.weight(layer.gate),
            up: self.weight(layer.up),
            down: self.weight(layer.down),
            attn_norm: &layer.attn_norm,
            ffn_norm: &layer.ffn_norm,
            q_bias: bias(0),
            k_bias: bias(1),
            v_bias: bias(2),
        }
    }

    /// Names the model's shape, tensor directory and norms: SHA-256. Two files with the same fingerprint can share caches and sessions.
    pub fn fingerprint(&self) -> [u8; 32] {
        self.fingerprint
    }

    /// Bytes of all tensors, as they lie in the file.
    pub fn weights_bytes(&self) -> usize {
        self.gguf.tensors().iter().map(TensorInfo::byte_count).sum()
    }

    fn weight(&self, matrix: Matrix) -> Weight<'_> {
        let tensor = &self.gguf.tensors()[matrix.tensor];
        Weight::new(tensor.dtype, matrix.rows, matrix.cols, self.gguf.tensor_bytes(tensor))
            .expect("shape and length were checked when the model was opened")
    }
}

/// Looks tensors up, checks them, and remembers which were used.
struct Tensors<'a> {
    gguf: &'a Gguf,
    used: HashSet<&'a str>,
}

impl<'a> Tensors<'a> {
    fn find(&mut self, name: &str, dims: &[usize]) -> Result<(usize, &'a TensorInfo)> {
        let path = || self.gguf.path().to_path_buf();
        let Some(position) = self.gguf.tensor_position(name) else {
            let expected = format!("dimensions {dims:?}");
            return Err(ModelError::MissingTensor { path: path(), name: name.to_string(), expected });
        };
        let tensor = &self.gguf.tensors()[position];
        if !tensor.dims.iter().copied().eq(dims.iter().map(|&dim| dim as u64)) {
            let (found, expected) = (format!("of dimensions {:?}", tensor.dims), format!("{dims:?}"));
            return Err(ModelError::Tensor { path: path(), name: name.to_string(), found, expected });
        }
        self.used.insert(&tensor.name);
        Ok((position, tensor))
    }

    fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<Matrix> {
        let (position, tensor) = self.find(name, &[cols, rows])?;
        if let Err(problem) = Weight::new(tensor.dtype, rows, cols, self.gguf.tensor_bytes(tensor)) {
            return Err(ModelError::Tensor {
                path: self.gguf.path().to_path_buf(),
                name: name.to_string(),
                found: problem.to_string(),
                expected: format!("a matrix of {rows} rows and {cols} columns"),
            });
        }
        Ok(Matrix { tensor: position, rows, cols })
    }

    /// A norm or a bias, decoded. These are stored as floats; a quantised one is not what any writer makes.
    fn vector(&mut self, name: &str, length: usize) -> Result<Vec<f32>> {
        let (_, tensor) = self.find(name, &[length])?;
        let bytes = self.gguf.tensor_bytes(tensor);
        let pairs = || bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]));
        let values: Vec<f32> = match tensor.dtype {
            WeightType::F32 => {
                bytes.chunks_exact(4).map(|four| f32::from_le_bytes([four[0], four[1], four[2], four[3]])).collect()
            }
            WeightType::F16 => pairs().map(|bits| f16::from_bits(bits).to_f32()).collect(),
            WeightType::BF16 => pairs().map(|bits| bf16::from_bits(bits).to_f32()).collect(),
            other => return Err(self.wrong(name, format!("of type {}", other.name()), "F32, F16 or BF16")),
        };
        match values.iter().position(|value| !value.is_finite()) {
            None => Ok(values),
            Some(at) => Err(self.wrong(name, format!("{} at index {at}", values[at]), "finite values")),
        }
    }

    fn frequency_factors(&mut self, name: &str, length: usize) -> Result<Vec<f32>> {
        let factors = self.vector(name, length)?;
        match factors.iter().position(|&factor| factor <= 0.0) {
            None => Ok(factors),
            Some(at) => Err(self.wrong(name, format!("{} at index {at}", factors[at]), "values above 0")),
        }
    }

    fn layer(&mut self, config: &ModelConfig, layer: usize) -> Result<Layer> {
        let (embed, ffn, q, kv) = (config.embed, config.ffn, config.q_width(), config.kv_width());
        let name = |part: &str| format!("blk.{layer}.{part}");
        let bias = match config.qkv_bias {
            true => Some([
                self.vector(&name("attn_q.bias"), q)?,
                self.vector(&name("attn_k.bias"), kv)?,
                self.vector(&name("attn_v.bias"), kv)?,
            ]),
            false => None,
        };
        Ok(Layer {
            attn_norm: self.vector(&name("attn_norm.weight"), embed)?,
            q: self.matrix(&name("attn_q.weight"), q, embed)?,
            k: self.matrix(&name("attn_k.weight"), kv, embed)?,
            v: self.matrix(&name("attn_v.weight"), kv, embed)?,
            o: self.matrix(&name("attn_output.weight"), embed, q)?,
            ffn_norm: self.vector(&name("ffn_norm.weight"), embed)?,
            gate: self.matrix(&name("ffn_gate.weight"), ffn, embed)?,
            up: self.matrix(&name("ffn_up.weight"), ffn, embed)?,
            down: self.matrix(&name("ffn_down.weight"), embed, ffn)?,
            bias,
        })
    }

    /// A tensor that nothing uses means that the model is not what its metadata says; its text would be silently wrong.
    fn refuse_unused(&self, config: &ModelConfig) -> Result<()> {
        let unused = |tensor: &&TensorInfo| {
            // Old converters wrote tables of rotary frequencies, which the metadata gives as well.
            let table = tensor.name.ends_with(".attn_rot_embd") || tensor.name.ends_with(".rotary_emb.inv_freq");
            !table && !self.used.contains(tensor.name.as_str())
        };
        match self.gguf.tensors().iter().find(unused) {
            None => Ok(()),
            Some(tensor) => Err(ModelError::UnknownTensor {
                path: self.gguf.path().to_path_buf(),
                name: tensor.name.clone(),
                architecture: config.architecture.name(),
            }),
        }
    }

    fn wrong(&self, name: &str, found: String, expected: &str) -> ModelError {
        ModelError::Tensor {
            path: self.gguf.path().to_path_buf(),
            name: name.to_string(),
            found,
            expected: expected.to_string(),
        }
    }
}

/// SHA-256 over the architecture fields, the tensor directory and the norms. The norms are decoded at load anyway, and tell a
/// fine-tuned model from its parent, whose shape and directory are the same.
fn fingerprint(gguf: &Gguf, config: &ModelConfig, layers: &[Layer], output_norm: &[f32]) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(b"forebay-model\x01");
    text(&mut hash, config.architecture.name());
    let sizes = [
        config.layers,
        config.embed,
        config.heads,
        config.kv_heads,
        config.head_dim,
        config.ffn,
        config.vocab,
        config.context,
        config.rope_dims,
    ];
    for size in sizes {
        hash.update((size as u64).to_le_bytes());
    }
    floats(&mut hash, &[config.rope_base, config.rope_scale, config.norm_eps]);
    hash.update((gguf.tensors().len() as u64).to_le_bytes());
    for tensor in gguf.tensors() {
        text(&mut hash, &tensor.name);
        text(&mut hash, tensor.dtype.name());
        hash.update((tensor.dims.len() as u64).to_le_bytes());
        tensor.dims.iter().for_each(|dim| hash.update(dim.to_le_bytes()));
        hash.update(tensor.offset.to_le_bytes());
    }
    for layer in layers {
        floats(&mut hash, &layer.attn_norm);
        floats(&mut hash, &layer.ffn_norm);
    }
    floats(&mut hash, output_norm);
    hash.finalize().into()
}

fn text(hash: &mut Sha256, text: &str) {
    hash.update((text.len() as u64).to_le_bytes());
    hash.update(text.as_bytes());
}

fn floats(hash: &mut Sha256, values: &[f32]) {
    values.iter().for_each(|value| hash.update(value.to_le_bytes()));
}
