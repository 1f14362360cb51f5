//! What a model file says about its shape, and its tensors.

mod model_support;

use forebay::model::{Architecture, Gguf, Model, ModelConfig, RopeStyle};
use forebay_kernels::{Isa, WeightType, dequantize_rows};
use model_support::smollm2;
use model_support::tiny_model::{GgufWriter, Meta, TinyArch, TinyModel, TinyType, tiny_model, write_tiny_model};

fn open(file: &GgufWriter) -> Result<Model, String> {
    let gguf = Gguf::from_bytes("tiny.gguf".as_ref(), file.finish()).map_err(|error| error.to_string())?;
    Model::from_gguf(gguf).map_err(|error| error.to_string())
}

fn assert_refused(change: impl FnOnce(&mut GgufWriter), says: &str) {
    let mut file = tiny_model(&TinyModel::default());
    change(&mut file);
    let text = open(&file).expect_err(says);
    assert!(
        text.starts_with("tiny.gguf: ") && text.contains(says) && !text.contains('\n'),
        "{text:?} does not say {says:?}"
    );
}

#[test]
fn a_tiny_model_of_every_type_opens() {
    let directory = tempfile::tempdir().unwrap();
    for arch in [TinyArch::Llama, TinyArch::Qwen2] {
        for dtype in TinyType::ALL {
            for tied_output in [false, true] {
                let shape = TinyModel { arch, dtype, tied_output, ..TinyModel::default() };
                let path = directory.path().join("tiny.gguf");
                write_tiny_model(&path, &shape).unwrap();
                let model = Model::open(&path).unwrap();
                let config = model.config();
                assert_eq!((config.layers, config.embed, config.heads, config.kv_heads), (2, 64, 4, 2));
                assert_eq!((config.head_dim, config.ffn, config.vocab, config.context), (16, 128, 301, 4096));
                assert_eq!((config.qkv_bias, config.tied_output), (arch == TinyArch::Qwen2, tied_output));
                let qwen2 = arch == TinyArch::Qwen2;
                assert_eq!(config.rope_style, if qwen2 { RopeStyle::Halves } else { RopeStyle::Interleaved });
                let layer = model.layer(1);
                assert_eq!((layer.q.rows(), layer.k.rows(), layer.v.rows(), layer.o.cols()), (64, 32, 32, 64));
                assert_eq!((layer.gate.rows(), layer.up.rows(), layer.down.cols()), (128, 128, 128));
                assert_eq!((layer.attn_norm.len(), layer.ffn_norm.len()), (64, 64));
                let biases = [layer.q_bias, layer.k_bias, layer.v_bias].map(|bias| bias.map(<[f32]>::len));
                assert_eq!(biases, if qwen2 { [Some(64), Some(32), Some(32)] } else { [None; 3] });
                assert_eq!(model.output().data() == model.token_embedding().data(), tied_output);
                assert_eq!(model.output().rows(), 301);
                assert!(model.weights_bytes() < model.gguf().file_bytes());
            }
        }
    }
}

/// The writer's quantisation is what the kernels decode: block formats agree with the plain values up to their step.
#[test]
fn tiny_weights_are_the_same_in_every_type() {
    let values = |dtype| {
        let model = open(&tiny_model(&TinyModel { dtype, ..TinyModel::default() })).unwrap();
        let weight = model.layer(0).q;
        let mut values = vec![0.0; weight.rows() * weight.cols()];
        dequantize_rows(Isa::best(), &weight, 0, &mut values);
        values
    };
    let exact: Vec<f32> = values(TinyType::F32);
    // Normal values: 32 of them reach 3 to 4 standard deviations, which 7, 7.5 or 127 steps span.
    for (dtype, bound) in
        [(TinyType::F16, 1e-3), (TinyType::Q8_0, 0.01), (TinyType::Q4_0, 0.16), (TinyType::Q4_1, 0.16)]
    {
        let stored = values(dtype);
        let norm = |values: &[f32]| values.iter().map(|value| value * value).sum::<f32>().sqrt();
        let error: Vec<f32> = exact.iter().zip(&stored).map(|(a, b)| a - b).collect();
        let relative = norm(&error) / norm(&exact);
        assert!(relative > 0.0 && relative < bound, "{dtype:?}: {relative}");
    }
}

#[test]
fn smollm2_is_what_its_card_says() {
    let Some(model) = smollm2() else {
        return;
    };
    let expected = ModelConfig {
        architecture: Architecture::Llama,
        name: "Smollm2 135M 8k Lc100K Mix1 Ep2".into(),
        layers: 30,
        embed: 576,
        heads: 9,
        kv_heads: 3,
        head_dim: 64,
        ffn: 1536,
        vocab: 49_152,
        context: 8192,
        rope_base: 100_000.0,
        rope_dims: 64,
        rope_style: RopeStyle::Interleaved,
        rope_freq_factors: None,
        rope_scale: 1.0,
        norm_eps: 1e-5,
        qkv_bias: false,
        tied_output: true,
    };
    assert_eq!(*model.config(), expected);
    assert_eq!((model.token_embedding().dtype(), model.layer(29).q.dtype()), (WeightType::Q8_0, WeightType::Q4_1));
    assert!(model.weights_bytes() > 96_000_000 && model.weights_bytes() < model.gguf().file_bytes());
}

#[test]
fn metadata_that_makes_no_model_is_named() {
    let set = |key: &'static str, value: Meta| move |file: &mut GgufWriter| file.set(key, value);
    let mamba = set("general.architecture", Meta::Text("mamba".into()));
    assert_refused(mamba, "architecture \"mamba\" is not supported, expected one of: llama, qwen2");
    assert_refused(|file| file.remove("general.architecture"), "\"general.architecture\" is missing");
    assert_refused(|file| file.remove("llama.block_count"), "\"llama.block_count\" is missing, expected a count");
    assert_refused(set("llama.block_count", Meta::U32(0)), "\"llama.block_count\" is 0, expected 1 to 1024");
    assert_refused(set("llama.block_count", Meta::U32(u32::MAX)), "expected 1 to 1024");
    assert_refused(set("llama.block_count", Meta::Text("2".into())), "holds a string, expected an integer");
    assert_refused(set("llama.block_count", Meta::U32(3)), "tensor \"blk.2.attn_norm.weight\" is missing");
    assert_refused(
        set("llama.block_count", Meta::U32(1)),
        "tensor \"blk.1.attn_q.weight\" is not part of architecture llama",
    );
    assert_refused(set("llama.attention.head_count_kv", Meta::U32(3)), "is 3, expected a divisor of the 4 query heads");
    assert_refused(
        set("llama.attention.head_count", Meta::I32s(vec![4, 2])),
        "expected the same number for every layer",
    );
    assert_refused(set("llama.attention.key_length", Meta::U32(15)), "is 15, expected even");
    assert_refused(set("llama.attention.value_length", Meta::U32(32)), "is 32, expected 16, as long as a key");
    assert_refused(set("llama.rope.dimension_count", Meta::U32(18)), "is 18, expected even, at most 16");
    assert_refused(set("llama.rope.freq_base", Meta::F32(f32::NAN)), "rope.freq_base\" is NaN");
    assert_refused(set("llama.attention.layer_norm_rms_epsilon", Meta::F32(0.0)), "is 0, expected above 0");
    assert_refused(
        set("llama.rope.scaling.type", Meta::Text("yarn".into())),
        "is \"yarn\", expected \"none\" or \"linear\"",
    );
    assert_refused(set("llama.expert_count", Meta::U32(8)), "mixtures of experts are not supported");
    assert_refused(
        set("llama.vocab_size", Meta::U32(300)),
        "is 300, expected 301, the length of tokenizer.ggml.tokens",
    );
    assert_refused(
        set("llama.embedding_length", Meta::U32(32)),
        "tensor \"token_embd.weight\" is of dimensions [64, 301], expected [32, 301]",
    );
}

#[test]
fn lists_of_equal_counts_and_linear_scaling_are_understood() {
    let mut file = tiny_model(&TinyModel::default());
    file.set("llama.attention.head_count_kv", Meta::I32s(vec![2, 2]));
    file.set("llama.rope.scaling.type", Meta::Text("linear".into()));
    file.set("llama.rope.scaling.factor", Meta::F32(4.0));
    file.tensor("rope_freqs.weight", &[8], 0, TinyType::F32.encode(&[1.0, 1.0, 1.0, 1.0, 2.0, 4.0, 8.0, 8.0]));
    let model = open(&file).unwrap();
    assert_eq!((model.config().kv_heads, model.config().rope_scale), (2, 0.25));
    assert_eq!(model.rope_freq_factors(), Some(&[1.0, 1.0, 1.0, 1.0, 2.0, 4.0, 8.0, 8.0][..]));
}

#[test]
fn tensors_that_make_no_model_are_named() {
    let drop = |name: &'static str| move |file: &mut GgufWriter| file.tensors.retain(|entry| entry.name != name);
    assert_refused(drop("token_embd.weight"), "tensor \"token_embd.weight\" is missing, expected dimensions [64, 301]");
    assert_refused(drop("blk.1.ffn_down.weight"), "tensor \"blk.1.ffn_down.weight\" is missing");
    let extra = |file: &mut GgufWriter| file.tensor("blk.0.attn_q_norm.weight", &[16], 0, vec![0; 64]);
    assert_refused(extra, "tensor \"blk.0.attn_q_norm.weight\" is not part of architecture llama");
    let swap = |file: &mut GgufWriter| file.entry("blk.0.attn_k.weight").unwrap().dims = vec![32, 64];
    assert_refused(swap, "is of dimensions [32, 64], expected [64, 32]");
    let nan = |file: &mut GgufWriter| {
        file.entry("output_norm.weight").unwrap().data[..4].copy_from_slice(&f32::NAN.to_le_bytes())
    };
    assert_refused(nan, "tensor \"output_norm.weight\" is NaN at index 0, expected finite values");
    let quantised = |file: &mut GgufWriter| {
        let entry = file.entry("output_norm.weight").unwrap();
        (entry.code, entry.data) = (8, vec![0; 68]);
    };
    assert_refused(quantised, "is of type Q8_0, expected F32, F16 or BF16");
    let half_a_bias = |file: &mut GgufWriter| file.tensor("blk.0.attn_q.bias", &[64], 0, vec![0; 256]);
    assert_refused(half_a_bias, "tensor \"blk.0.attn_k.bias\" is missing");
}

#[test]
fn the_fingerprint_tells_models_apart() {
    let print = |change: &dyn Fn(&mut GgufWriter)| {
        let mut file = tiny_model(&TinyModel::default());
        change(&mut file);
        open(&file).unwrap().fingerprint()
    };
    let same = print(&|_| {});
    assert_eq!(same, print(&|_| {}));
    // What the model computes with changes it; a name or a template does not.
    assert_eq!(same, print(&|file| file.set("tokenizer.chat_template", Meta::Text("x".into()))));
    assert_ne!(same, print(&|file| file.set("llama.context_length", Meta::U32(8192))));
    assert_ne!(same, print(&|file| file.set("llama.rope.freq_base", Meta::F32(500_000.0))));
    assert_ne!(same, print(&|file| file.entry("output_norm.weight").unwrap().data[1] ^= 1));
    assert_ne!(same, open(&tiny_model(&TinyModel { seed: 2, ..TinyModel::default() })).unwrap().fingerprint());
    assert_ne!(
        same,
        open(&tiny_model(&TinyModel { dtype: TinyType::F16, ..TinyModel::default() })).unwrap().fingerprint()
    );
}

#[test]
fn a_model_is_shared_between_threads() {
    fn shared<T: Send + Sync + 'static>(_: &T) {}
    shared(&open(&tiny_model(&TinyModel::default())).unwrap());
}
