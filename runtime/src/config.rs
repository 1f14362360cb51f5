//! Settings of the KV tiers, and the JSON file that carries them (`forebay.json`).

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// How a session keeps its KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// Everything in memory, f16; attention over all tokens.
    Full,
    /// Sketch, sinks, window and reuse buffer in memory, full KV on disk.
    Forebay,
    /// The KVSwap paper's own setting: `sum` aggregation, `pca` f16 sketch, no sinks, one group of window, FIFO with `C = M`.
    Kvswap,
    /// Every group is read from disk for every layer and step.
    LoadAll,
    /// Sinks and a rolling window as large as the budget allows; nothing is fetched.
    Window,
}

impl Policy {
    /// All policies by name, in the order in which help texts list them.
    pub const NAMES: [&'static str; 5] = ["full", "forebay", "kvswap", "load-all", "window"];

    /// The policy's name on the command line and in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Policy::Full => "full",
            Policy::Forebay => "forebay",
            Policy::Kvswap => "kvswap",
            Policy::LoadAll => "load-all",
            Policy::Window => "window",
        }
    }
}

impl std::str::FromStr for Policy {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        parse_word("policy", s)
    }
}

/// How a group's rows are scored against the query heads (algorithms: group selection).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Aggregate {
    /// Sum of raw scores over query heads.
    Sum,
    /// Mean query per KV head, softmax over tokens, sum over KV heads.
    SoftmaxKv,
    /// Softmax over tokens per query head, sum over heads.
    Softmax,
}

/// How the key-side and query-side projections of the sketch are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AdapterKind {
    /// Top eigenvectors of the second moment of the keys.
    Pca,
    /// The same after the mean key is subtracted.
    Centred,
    /// Minimises the error of the scores under the second moment of the queries.
    QueryAware,
}

/// Number format of sketch rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SketchPrecision {
    /// Half precision.
    F16,
    /// 8-bit integers, one f16 scale per row.
    I8,
    /// 4-bit integers, one f16 scale per row.
    I4,
}

impl SketchPrecision {
    /// The kernels' name of this format.
    pub fn kernel(self) -> forebay_kernels::sketch::SketchType {
        use forebay_kernels::sketch::SketchType;
        match self {
            SketchPrecision::F16 => SketchType::F16,
            SketchPrecision::I8 => SketchType::I8,
            SketchPrecision::I4 => SketchType::I4,
        }
    }
}

/// Which group leaves the reuse buffer first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Replacement {
    /// The one that was fetched first.
    Fifo,
    /// The one that was used longest ago.
    Lru,
}

/// Which groups a step attends to besides sinks and window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Selection {
    /// The top `selected_groups` by sketch score.
    Sketch,
    /// All of them.
    All,
    /// None.
    None,
}

/// Settings of the tiers for one sequence. Symbols as in `docs/handbook.md`; counts of groups unless a name says tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CacheConfig {
    /// `G`: tokens per group, 1 to 256.
    pub group: usize,
    /// What is attended to besides sinks and window.
    #[serde(default = "CacheConfig::default_selection")]
    pub selection: Selection,
    /// `r`: values per sketch row.
    pub rank: usize,
    /// Number format of a sketch row.
    pub sketch: SketchPrecision,
    /// Tokens that share one sketch row; divides `group`.
    pub sketch_pool: usize,
    /// How the projections are made.
    pub adapter: AdapterKind,
    /// How scores become a group's score.
    pub aggregate: Aggregate,
    /// `M`: groups selected per layer and step.
    pub selected_groups: usize,
    /// `C`: slots of the reuse buffer per layer.
    pub reuse_groups: usize,
    /// Which group leaves the reuse buffer first.
    #[serde(default = "CacheConfig::default_replacement")]
    pub replacement: Replacement,
    /// `S`: first tokens that stay resident (rounded up to whole groups).
    pub sinks: usize,
    /// `W`: most recent tokens that stay resident (rounded up to whole groups).
    pub window: usize,
    /// Groups fetched late per layer, once the true query is known.
    #[serde(default)]
    pub refine_groups: usize,
    /// Layers that the prediction runs ahead; 1 is what this version does.
    #[serde(default = "CacheConfig::default_lookahead")]
    pub lookahead: usize,
    /// Groups read needlessly to join two extents of one read.
    #[serde(default)]
    pub merge_gap: usize,
    /// Selected groups are left out where the predicted attention to their best token, averaged over the queries, is below this; 0 to 1.
    /// Without effect under `sum`, whose scores are no probabilities.
    #[serde(default)]
    pub score_floor: f32,
}

impl CacheConfig {
    fn default_selection() -> Selection {
        Selection::Sketch
    }
    fn default_replacement() -> Replacement {
        Replacement::Fifo
    }
    fn default_lookahead() -> usize {
        1
    }

    /// Groups that hold the sinks.
    pub fn sink_groups(&self) -> usize {
        self.sinks.div_ceil(self.group)
    }

    /// Complete groups in the rolling window, besides the one that is being filled.
    pub fn window_groups(&self) -> usize {
        self.window.div_ceil(self.group)
    }

    /// Checks ranges and combinations for keys of `key_dim = kv_heads * head_dim` values.
    pub fn validate(&self, key_dim: usize) -> Result<()> {
        let fail = |field: &'static str, found: String, expected: String| Err(Error::Config { field, found, expected });
        if self.group == 0 || self.group > MAX_GROUP {
            return fail("group", self.group.to_string(), format!("1 to {MAX_GROUP}"));
        }
        if self.selection == Selection::Sketch {
            if self.rank == 0 || self.rank > key_dim {
                return fail("rank", self.rank.to_string(), format!("1 to {key_dim} (kv_heads * head_dim)"));
            }
            if self.sketch_pool == 0 || !self.group.is_multiple_of(self.sketch_pool) {
                return fail(
                    "sketch_pool",
                    self.sketch_pool.to_string(),
                    format!("a divisor of group = {}", self.group),
                );
            }
            if self.selected_groups == 0 {
                return fail("selected_groups", "0".into(), "at least 1".into());
            }
        }
        if self.selected_groups > MAX_GROUPS || self.reuse_groups > MAX_SLOTS || self.refine_groups > MAX_GROUPS {
            return fail(
                "selected_groups, reuse_groups, refine_groups",
                format!("{}, {}, {}", self.selected_groups, self.reuse_groups, self.refine_groups),
                format!("at most {MAX_GROUPS}, {MAX_SLOTS}, {MAX_GROUPS}"),
            );
        }
        if self.sinks > MAX_TOKENS || self.window > MAX_TOKENS {
            return fail("sinks, window", format!("{}, {}", self.sinks, self.window), format!("at most {MAX_TOKENS}"));
        }
        if self.merge_gap > MAX_MERGE_GAP {
            return fail("merge_gap", self.merge_gap.to_string(), format!("at most {MAX_MERGE_GAP}"));
        }
        if !(0.0..1.0).contains(&self.score_floor) {
            return fail("score_floor", self.score_floor.to_string(), "0 to below 1".into());
        }
        if self.lookahead != 1 {
            return fail("lookahead", self.lookahead.to_string(), "1".into());
        }
        Ok(())
    }

    /// Applies `key=value` pairs separated by commas, for example `group=8,rank=48,sketch=i4`.
    pub fn apply_overrides(&mut self, pairs: &str) -> Result<()> {
        let mut json = serde_json::to_value(&*self).map_err(|e| Error::internal(e.to_string()))?;
        for pair in pairs.split(',').filter(|p| !p.trim().is_empty()) {
            let bad = |expected: String| Error::Config { field: "--set", found: pair.to_string(), expected };
            let (key, value) = pair.split_once('=').ok_or_else(|| bad("key=value".into()))?;
            let value = value.trim();
            let whole = value.parse::<u64>().map(serde_json::Value::from);
            let number = || value.parse::<f64>().map(serde_json::Value::from);
            let parsed = whole.or_else(|_| number()).unwrap_or_else(|_| value.into());
            match json.get_mut(key.trim()) {
                Some(slot) => *slot = parsed,
                None => return Err(bad("a field of the cache configuration".into())),
            }
            // Parsed after every pair, so that the message names the pair that is wrong.
            *self = serde_json::from_value(json.clone()).map_err(|e| bad(e.to_string()))?;
        }
        Ok(())
    }
}

/// Largest `G`: a record of 256 tokens of a large model is already megabytes.
pub const MAX_GROUP: usize = 256;
/// Largest number of groups selected or refined per layer.
pub const MAX_GROUPS: usize = 1 << 20;
/// Largest number of reuse slots per layer: the slot table holds 16-bit slot numbers.
pub const MAX_SLOTS: usize = u16::MAX as usize - 1;
/// Largest number of tokens of a context that this version accepts.
pub const MAX_TOKENS: usize = 1 << 26;
/// Largest gap that may be read needlessly.
pub const MAX_MERGE_GAP: usize = 64;

/// Where the settings of a session came from, for the JSON output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConfigSource {
    /// Documented defaults from the model's shape and the budget.
    Defaults,
    /// A configuration file.
    File(String),
}

/// The model that a configuration was made for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConfigModel {
    /// `sha256:` and 64 hexadecimal digits.
    pub fingerprint: String,
    /// For people.
    #[serde(default)]
    pub name: String,
    /// Transformer layers.
    pub layers: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Values per head.
    pub head_dim: usize,
}

/// What a configuration may be used for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConfigLimits {
    /// Largest context in tokens.
    pub max_context: usize,
    /// Largest number of sequences.
    pub max_batch: usize,
    /// KV-side memory in bytes.
    pub kv_memory_bytes: u64,
}

/// The settings for one pair of batch and context.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Solution {
    /// Sequences stepped together.
    pub batch: usize,
    /// Context in tokens.
    pub context: usize,
    /// The settings.
    #[serde(flatten)]
    pub cache: CacheConfig,
}

/// `forebay.json`, version 1.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConfigFile {
    /// Always `forebay-config`.
    pub format: String,
    /// Always 1.
    pub version: u32,
    /// The model that the solutions are for.
    pub model: ConfigModel,
    /// What the solutions may be used for.
    pub limits: ConfigLimits,
    /// One entry per (batch, context) pair.
    pub solutions: Vec<Solution>,
}

impl ConfigFile {
    /// Reads and checks a file.
    pub fn read(path: &Path) -> Result<ConfigFile> {
        let name = path.display().to_string();
        let bad =
            |found: String, expected: &str| Error::ConfigFile { file: name.clone(), found, expected: expected.into() };
        let size = std::fs::metadata(path).map_err(|e| bad(e.to_string(), "a readable configuration file"))?.len();
        if size > MAX_CONFIG_BYTES {
            return Err(bad(format!("{size} bytes"), "a configuration file of at most 16 MiB"));
        }
        let text = std::fs::read_to_string(path).map_err(|e| bad(e.to_string(), "a readable configuration file"))?;
        Self::parse(&text).map_err(|e| bad(e, "a forebay-config file of version 1"))
    }

    /// Parses the text of a file; the error says what was found.
    pub fn parse(text: &str) -> std::result::Result<ConfigFile, String> {
        let file: ConfigFile = serde_json::from_str(text).map_err(|e| e.to_string())?;
        if file.format != "forebay-config" {
            return Err(format!("format {:?}", file.format));
        }
        if file.version != 1 {
            return Err(format!("version {}", file.version));
        }
        if file.solutions.is_empty() {
            return Err("no solutions".into());
        }
        let key_dim = file.model.kv_heads.checked_mul(file.model.head_dim).ok_or("absurd model dimensions")?;
        for solution in &file.solutions {
            solution.cache.validate(key_dim).map_err(|e| e.to_string())?;
        }
        Ok(file)
    }

    /// The solution for `context` tokens of one sequence: the smallest context that covers it, else the largest there is.
    pub fn solution(&self, context: usize) -> &CacheConfig {
        let single = || self.solutions.iter().filter(|s| s.batch == 1);
        let best = single()
            .filter(|s| s.context >= context)
            .min_by_key(|s| s.context)
            .or_else(|| single().max_by_key(|s| s.context))
            .unwrap_or(&self.solutions[0]);
        &best.cache
    }
}

/// A configuration holds a few hundred solutions; more than this is not one.
const MAX_CONFIG_BYTES: u64 = 16 << 20;

fn parse_word<T: serde::de::DeserializeOwned>(field: &'static str, word: &str) -> Result<T> {
    serde_json::from_value(serde_json::Value::String(word.to_string())).map_err(|e| Error::Config {
        field,
        found: word.to_string(),
        expected: e.to_string(),
    })
}
