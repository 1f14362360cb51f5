//! The GGUF parser on good files, on every kind of damage, and on random damage.

mod model_support;

use std::path::Path;

use forebay::model::{ChatTemplate, Gguf, Model, ModelError, Tokenizer};
use forebay_kernels::WeightType;
use model_support::tiny_model::{self, GgufWriter, Meta, Random, TinyArch, TinyModel, TinyType};

fn parse(bytes: Vec<u8>) -> Result<Gguf, ModelError> {
    Gguf::from_bytes(Path::new("tiny.gguf"), bytes)
}

/// A small file with one value of most types, one nested array and two tensors.
fn small() -> GgufWriter {
    let mut file = GgufWriter::new();
    file.set("general.architecture", Meta::Text("llama".into()));
    file.set("a.u32", Meta::U32(7));
    file.set("a.f32", Meta::F32(0.5));
    file.set("a.bool", Meta::Bool(true));
    file.set("a.texts", Meta::Texts(vec!["one".into(), "zwei".into()]));
    file.set("a.numbers", Meta::I32s(vec![-1, 2]));
    file.set("a.nested", nested(2));
    file.tensor("a", &[32, 2], 8, vec![1; 68]);
    file.tensor("b", &[3], 0, vec![2; 12]);
    file
}

/// `depth` arrays of one element around one byte.
fn nested(depth: usize) -> Meta {
    let mut bytes = Vec::new();
    for level in 0..depth {
        let element: u32 = if level + 1 == depth { 0 } else { 9 };
        bytes.extend(element.to_le_bytes());
        bytes.extend(1u64.to_le_bytes());
    }
    bytes.push(42);
    Meta::Raw(9, bytes)
}

/// The message of the error that a file gives; it names the file and is one line.
fn message(bytes: Vec<u8>) -> String {
    let text = parse(bytes).expect_err("the file is damaged").to_string();
    assert!(text.starts_with("tiny.gguf: ") && !text.contains('\n'), "{text}");
    text
}

fn assert_says(bytes: Vec<u8>, parts: &[&str]) {
    let text = message(bytes);
    for part in parts {
        assert!(text.contains(part), "{text:?} does not say {part:?}");
    }
}

#[test]
fn a_good_file_is_read() {
    for version in [2, 3] {
        let mut file = small();
        file.version = version;
        let gguf = parse(file.finish()).unwrap();
        assert_eq!(gguf.version(), version);
        assert_eq!(gguf.string("general.architecture").unwrap(), Some("llama"));
        assert_eq!(gguf.unsigned("a.u32").unwrap(), Some(7));
        assert_eq!(gguf.float("a.f32").unwrap(), Some(0.5));
        assert_eq!(gguf.boolean("a.bool").unwrap(), Some(true));
        assert_eq!(gguf.strings("a.texts").unwrap(), Some(vec!["one", "zwei"]));
        assert_eq!(gguf.integers("a.numbers").unwrap(), Some(vec![-1, 2]));
        assert_eq!(gguf.unsigned("absent").unwrap(), None);
        let wrong = gguf.unsigned("a.texts").unwrap_err().to_string();
        assert_eq!(
            wrong,
            "tiny.gguf: metadata key \"a.texts\" holds an array of 2 values of type String, expected an integer of at least 0"
        );
        let (a, b) = (gguf.tensor("a").unwrap(), gguf.tensor("b").unwrap());
        assert_eq!((a.dtype, a.dims.as_slice(), gguf.tensor_bytes(a)), (WeightType::Q8_0, &[32, 2][..], &[1; 68][..]));
        assert_eq!((b.dtype, b.offset, gguf.tensor_bytes(b)), (WeightType::F32, 96, &[2; 12][..]));
        assert!(gguf.tensor("c").is_none());
    }
}

#[test]
fn what_is_not_gguf_is_named() {
    assert_says(Vec::new(), &["not a GGUF file", "[]", "expected \"GGUF\""]);
    assert_says(b"PK\x03\x04".to_vec(), &["not a GGUF file", "[50, 4b, 03, 04]"]);
    assert_says(b"GGUF\x03".to_vec(), &["truncated: version at byte 4 needs 4 bytes, the file has 1 left"]);
    for (version, says) in [(0, "version 0"), (1, "version 1 is not supported, expected 2 or 3"), (4, "version 4")] {
        let mut file = small();
        file.version = version;
        assert_says(file.finish(), &[says]);
    }
    let mut file = small();
    file.version = 3u32.swap_bytes();
    assert_says(file.finish(), &["big-endian", "version 3", "expected little-endian"]);
}

#[test]
fn every_truncation_is_an_error() {
    let bytes = small().finish();
    for length in 0..bytes.len() {
        message(bytes[..length].to_vec());
    }
}

#[test]
fn counts_are_checked_before_anything_is_allocated() {
    for counts in [(u64::MAX, 0), (0, u64::MAX), (1 << 40, 1), (3, 1 << 20)] {
        let mut file = small();
        file.counts = Some(counts);
        assert_says(file.finish(), &["count is", "expected at most"]);
    }
    let array = |element: u32, count: u64| {
        let mut file = small();
        file.set("a.array", Meta::Raw(9, [&element.to_le_bytes()[..], &count.to_le_bytes()[..]].concat()));
        file.finish()
    };
    assert_says(array(4, u64::MAX), &["truncated: metadata array"]);
    assert_says(array(8, u64::MAX), &["length of a metadata array is 18446744073709551615"]);
    assert_says(array(9, 1 << 50), &["length of a metadata array"]);
    assert_says(array(77, 1), &["\"a.array\" has value type 77, expected 0 to 12"]);
    let mut file = small();
    file.set("a.text", Meta::Raw(8, u64::MAX.to_le_bytes().to_vec()));
    assert_says(file.finish(), &["truncated: metadata string"]);
}

#[test]
fn metadata_is_checked() {
    let mut file = small();
    file.metadata.push(("a.u32".into(), Meta::U32(8)));
    assert_says(file.finish(), &["\"a.u32\" stands there twice"]);
    let mut file = small();
    file.set("a.deep", nested(4));
    assert!(parse(file.finish()).is_ok());
    file.set("a.deep", nested(5));
    assert_says(file.finish(), &["\"a.deep\" nests arrays deeper than 4"]);
    for alignment in [0u32, 1, 4, 24, 33, 1 << 31] {
        let mut file = small();
        file.set("general.alignment", Meta::U32(alignment));
        let says = format!("general.alignment is {alignment}, expected a power of two from 8");
        assert_says(file.finish(), &[&says]);
    }
    let mut file = small();
    file.set("general.alignment", Meta::Text("32".into()));
    assert_says(file.finish(), &["general.alignment is of type String"]);
    let mut file = small();
    file.alignment = 256;
    file.set("general.alignment", Meta::U32(256));
    let gguf = parse(file.finish()).unwrap();
    assert_eq!(gguf.tensor_bytes(gguf.tensor("b").unwrap()), &[2; 12]);
}

#[test]
fn tensors_are_checked() {
    let damaged = |damage: &dyn Fn(&mut forebay::model::gguf::TensorEntry)| {
        let mut file = small();
        damage(file.entry("b").unwrap());
        file.finish()
    };
    assert_says(damaged(&|entry| entry.name = "a".into()), &["\"a\" stands in the directory twice"]);
    assert_says(damaged(&|entry| entry.name = String::new()), &["is 0 bytes long"]);
    assert_says(damaged(&|entry| entry.name = "x".repeat(257)), &["is 257 bytes long, expected 1 to 256"]);
    assert_says(damaged(&|entry| entry.dims = vec![]), &["\"b\" has 0 dimensions"]);
    assert_says(damaged(&|entry| entry.dims = vec![1; 5]), &["\"b\" has 5 dimensions, expected 1 to 4"]);
    assert_says(damaged(&|entry| entry.dims = vec![3, 0]), &["\"b\" has dimensions [3, 0]"]);
    assert_says(damaged(&|entry| entry.dims = vec![1 << 40, 1 << 40]), &["\"b\" has dimensions [1099511627776"]);
    assert_says(damaged(&|entry| entry.dims = vec![1 << 62]), &["\"b\" has dimensions [4611686018427387904]"]);
    assert_says(damaged(&|entry| entry.dims = vec![4]), &["\"b\" needs 16 bytes at byte", "truncated or damaged"]);
    assert_says(damaged(&|entry| entry.code = 16), &["\"b\" has type IQ2_XXS, expected one of F32, F16"]);
    assert_says(damaged(&|entry| entry.code = 4), &["\"b\" has type number 4, which nobody has defined"]);
    assert_says(damaged(&|entry| entry.code = 2), &["\"b\" has rows of 3 values, expected a multiple of 32 for Q4_0"]);
    assert_says(
        damaged(&|entry| entry.offset = Some(8)),
        &["\"b\" starts at offset 8, expected a multiple of the alignment 32"],
    );
    assert_says(damaged(&|entry| entry.offset = Some(64)), &["tensors \"a\" and \"b\" overlap"]);
    assert_says(
        damaged(&|entry| entry.offset = Some(1 << 40)),
        &["\"b\" needs 12 bytes at byte", "the file ends at byte"],
    );
    assert_says(damaged(&|entry| entry.offset = Some(u64::MAX - 31)), &["\"b\" needs 12 bytes"]);
}

#[test]
fn files_that_cannot_be_read_are_named() {
    let directory = tempfile::tempdir().unwrap();
    for path in [directory.path().to_path_buf(), directory.path().join("absent.gguf")] {
        let text = Gguf::open(&path).unwrap_err().to_string();
        assert!(text.starts_with(&format!("{}: cannot read the model file: ", path.display())), "{text}");
    }
    let empty = directory.path().join("empty.gguf");
    std::fs::write(&empty, b"").unwrap();
    assert!(Gguf::open(&empty).is_err());
}

/// Whatever the bytes are, opening gives a model or an error, and what opens can be used.
#[test]
fn random_damage_never_panics() {
    const ROUNDS: usize = 24_000;
    let shape =
        TinyModel { layers: 1, embed: 32, heads: 2, kv_heads: 1, head_dim: 16, ffn: 32, ..TinyModel::default() };
    let seeds = [
        small().finish(),
        tiny_model::tiny_model(&TinyModel { dtype: TinyType::Q4_0, ..shape }).finish(),
        tiny_model::tiny_model(&TinyModel { dtype: TinyType::Q8_0, arch: TinyArch::Qwen2, ..shape }).finish(),
    ];
    let mut random = Random(20_240_601);
    let (mut models, mut errors) = (0, 0);
    for round in 0..ROUNDS {
        let mut bytes = seeds[random.below(seeds.len())].clone();
        // The head of the file is what the parser reads; the weights are only numbers.
        let head = bytes.len().min(14_000);
        for _ in 0..=random.below(4) {
            let reach = if random.below(8) == 0 { bytes.len() } else { head.min(bytes.len()) };
            let at = random.below(reach);
            match random.below(5) {
                0 => bytes[at] ^= 1 << random.below(8),
                1 => bytes[at] = random.bits() as u8,
                2 => {
                    let extreme = [0u64, 1, u64::MAX, 1 << 31, 1 << 32, 1 << 62, i64::MAX as u64][random.below(7)];
                    let end = (at + 8).min(bytes.len());
                    bytes[at..end].copy_from_slice(&extreme.to_le_bytes()[..end - at]);
                }
                3 => {
                    bytes.remove(at);
                }
                _ => bytes.insert(at, random.bits() as u8),
            }
        }
        if random.below(10) == 0 {
            bytes.truncate(random.below(bytes.len()));
        }
        let used = std::panic::catch_unwind(|| use_file(bytes));
        match used.unwrap_or_else(|_| panic!("round {round} panics")) {
            true => models += 1,
            false => errors += 1,
        }
    }
    assert!(
        models > ROUNDS / 100 && errors > ROUNDS / 4,
        "{models} models, {errors} errors: the damage is not what it should be"
    );
}

/// Goes through everything that reads a model file. True if the model opened.
fn use_file(bytes: Vec<u8>) -> bool {
    let Ok(gguf) = parse(bytes) else {
        return false;
    };
    if let Ok(tokenizer) = Tokenizer::from_gguf(&gguf) {
        let tokens = tokenizer.encode("the <|im_end|> of 12 things\n", true).unwrap();
        tokenizer.decode(&tokens, false);
        tokenizer.decode(&[0, 5, u32::MAX], true);
    }
    if let Ok(template) = ChatTemplate::from_gguf(&gguf) {
        let _ = template.render(&[forebay::model::Message::new("user", "hi")], true);
    }
    for tensor in gguf.tensors() {
        assert_eq!(gguf.tensor_bytes(tensor).len(), tensor.byte_count());
    }
    let Ok(model) = Model::from_gguf(gguf) else {
        return false;
    };
    let config = model.config();
    assert_eq!(model.output().rows(), config.vocab);
    for layer in 0..config.layers {
        let weights = model.layer(layer);
        assert_eq!((weights.q.rows(), weights.down.cols()), (config.q_width(), config.ffn));
    }
    true
}
