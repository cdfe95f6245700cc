//! Special tokens: which there are, which of them end a generation, and where they stand in a text.
//!
//! Converters have never agreed on metadata for these, so llama.cpp recognises many by their text;
//! the lists here are the same.

use super::error::TextError;
use super::meta::Meta;
use super::vocab::{Vocab, attr};

/// Ends a turn; the first that exists is the end-of-turn token where the metadata names none.
const EOT: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<｜end▁of▁sentence｜>",
    "<end_of_utterance>",
];
const EOM: &[&str] = &["<|eom_id|>"];

/// Fill-in-the-middle tokens: metadata keys, texts, and whether they end a generation.
const FIM: &[(&[&str], &[&str], bool)] = &[
    (
        &[
            "tokenizer.ggml.fim_pre_token_id",
            "tokenizer.ggml.prefix_token_id",
        ],
        &[
            "<|fim_prefix|>",
            "<fim-prefix>",
            "<fim_prefix>",
            "<｜fim▁begin｜>",
            "<PRE>",
            "▁<PRE>",
            "<|code_prefix|>",
            "<|prefix|>",
        ],
        false,
    ),
    (
        &[
            "tokenizer.ggml.fim_suf_token_id",
            "tokenizer.ggml.suffix_token_id",
        ],
        &[
            "<|fim_suffix|>",
            "<fim-suffix>",
            "<fim_suffix>",
            "<｜fim▁hole｜>",
            "<SUF>",
            "▁<SUF>",
            "<|code_suffix|>",
            "<|suffix|>",
        ],
        false,
    ),
    (
        &[
            "tokenizer.ggml.fim_mid_token_id",
            "tokenizer.ggml.middle_token_id",
        ],
        &[
            "<|fim_middle|>",
            "<fim-middle>",
            "<fim_middle>",
            "<｜fim▁end｜>",
            "<MID>",
            "▁<MID>",
            "<|code_middle|>",
            "<|middle|>",
        ],
        false,
    ),
    (
        &["tokenizer.ggml.fim_pad_token_id"],
        &["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"],
        true,
    ),
    (
        &["tokenizer.ggml.fim_rep_token_id"],
        &[
            "<|fim_repo|>",
            "<|repo_name|>",
            "<fim-repo>",
            "<REPO>",
            "<reponame>",
        ],
        true,
    ),
    (
        &["tokenizer.ggml.fim_sep_token_id"],
        &["<|file_sep|>"],
        true,
    ),
];

/// Every token with one of these texts ends a generation.
const EOG: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
];

/// gpt-oss frames its output with these: text, not markup.
const SHOWN: &[&str] = &["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"];

/// Different lengths of special tokens, at most: every one is a pass over the input. Gemma 3 has 48.
const SHAPES_MAX: usize = 256;

/// Bytes that [`Specials`] holds, at most.
pub(super) const BYTES_MAX: u64 =
    (SHAPES_MAX * size_of::<Shape>() + (EOG.len() + FIM.len() + 3) * 4) as u64;

/// Tokens with a role, and what is needed to find special tokens in text.
#[derive(Debug)]
pub(super) struct Specials {
    pub bos: Option<u32>,
    pub eos: Option<u32>,
    pub eot: Option<u32>,
    pub unknown: Option<u32>,
    /// Ids that end a generation, ascending.
    eog: Box<[u32]>,
    /// Texts of special tokens by length, longest first.
    shapes: Box<[Shape]>,
}

/// Special tokens of one length.
#[derive(Debug)]
struct Shape {
    len: u32,
    /// The bytes with which they begin, one bit each.
    first: [u64; 4],
}

/// A piece of the input.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Fragment<'t> {
    /// Text to be tokenized.
    Text(&'t [u8]),
    /// A special token.
    Token(u32),
}

/// What the kind of tokenizer takes the tokens to be where the metadata doesn't say.
#[derive(Clone, Copy, Default)]
pub(super) struct Defaults {
    pub bos: Option<u32>,
    pub eos: Option<u32>,
    pub unknown: Option<u32>,
}

impl Specials {
    /// Reads the roles, and corrects the tokens' attributes where their text tells more than their
    /// type.
    pub(super) fn new(
        meta: Meta<'_, '_>,
        vocab: &mut Vocab,
        defaults: Defaults,
    ) -> Result<Self, TextError> {
        let tokens = vocab.len();
        let known = |id: Option<u32>| id.filter(|&id| id < tokens);
        let bos = meta
            .id("tokenizer.ggml.bos_token_id", tokens)?
            .or(known(defaults.bos));
        let eos = meta
            .id("tokenizer.ggml.eos_token_id", tokens)?
            .or(known(defaults.eos));
        let unknown = meta
            .id("tokenizer.ggml.unknown_token_id", tokens)?
            .or(known(defaults.unknown));
        let mut eot = meta.id("tokenizer.ggml.eot_token_id", tokens)?;
        let mut eom = meta.id("tokenizer.ggml.eom_token_id", tokens)?;
        for (id, texts) in [(&mut eot, EOT), (&mut eom, EOM)] {
            if id.is_none() {
                *id = by_text(vocab, texts);
                mark_control(vocab, *id);
            }
        }

        let mut eog: Vec<u32> = [eos, eot, eom].into_iter().flatten().collect();
        for &(keys, texts, ends) in FIM {
            let mut id = None;
            for key in keys {
                id = id.or(meta.id(key, tokens)?);
            }
            if id.is_none() {
                id = by_text(vocab, texts);
                mark_control(vocab, id);
            }
            eog.extend(id.filter(|_| ends));
        }
        for text in EOG {
            let id = vocab.find(text.as_bytes());
            mark_control(vocab, id);
            eog.extend(id);
        }

        // gpt-oss and solar-open end with other tokens, and <|end|> only closes a part.
        let ends = |text: &str| {
            let id = vocab.find(text.as_bytes());
            id.filter(|id| eog.contains(id))
        };
        let has = |text| ends(text).is_some();
        let calls = has("<|call|>") || has("<|calls|>");
        let end = ends("<|end|>").filter(|_| calls && (has("<|return|>") || has("<|flush|>")));
        // Gemma 4 has </s> as a piece of HTML.
        let html = ends("</s>").filter(|_| has("<|tool_response>"));

        for text in SHOWN {
            if let Some(id) = vocab.find(text.as_bytes()) {
                vocab.attrs_mut()[id as usize] = attr::USER_DEFINED;
            }
        }
        for (id, attrs) in [(end, attr::USER_DEFINED), (html, attr::NORMAL)] {
            if let Some(id) = id {
                eog.retain(|&ends| ends != id);
                vocab.attrs_mut()[id as usize] = attrs;
            }
        }
        eog.sort_unstable();
        eog.dedup();

        if strips(meta)? {
            set_rstrip(vocab);
        }
        let shapes = shapes(vocab)?;
        Ok(Self {
            bos,
            eos,
            eot,
            unknown,
            eog: eog.into(),
            shapes,
        })
    }

    /// Whether a generation ends with this token.
    pub(super) fn is_eog(&self, id: u32) -> bool {
        self.eog.binary_search(&id).is_ok()
    }

    /// Cuts `text` at the special tokens in it: longest first, among equals leftmost first. Control
    /// and unknown tokens count only if `parse`; user-defined ones always.
    pub(super) fn cut<'t>(&self, vocab: &Vocab, text: &'t [u8], parse: bool) -> Vec<Fragment<'t>> {
        let hidden = if parse {
            0
        } else {
            attr::CONTROL | attr::UNKNOWN
        };
        let mut fragments = Vec::new();
        if !text.is_empty() {
            fragments.push(Fragment::Text(text));
        }
        let mut next = Vec::new();
        for shape in &self.shapes {
            next.clear();
            for &fragment in &fragments {
                match fragment {
                    Fragment::Text(text) => shape.cut(vocab, text, hidden, &mut next),
                    Fragment::Token(_) => next.push(fragment),
                }
            }
            std::mem::swap(&mut fragments, &mut next);
        }
        fragments
    }

    /// What the tables hold, in bytes.
    pub(super) fn table_bytes(&self) -> u64 {
        (self.eog.len() * 4 + self.shapes.len() * size_of::<Shape>()) as u64
    }
}

impl Shape {
    fn cut<'t>(&self, vocab: &Vocab, text: &'t [u8], hidden: u8, out: &mut Vec<Fragment<'t>>) {
        let len = self.len as usize;
        let (mut from, mut at) = (0, 0);
        while at + len <= text.len() {
            let window = &text[at..at + len];
            let first = usize::from(window[0]);
            let found = (self.first[first / 64] >> (first % 64) & 1 == 1)
                .then(|| vocab.find(window))
                .flatten()
                .filter(|&id| is_special(vocab.attrs(id)) && vocab.attrs(id) & hidden == 0);
            let Some(id) = found else {
                at += 1;
                continue;
            };
            if from < at {
                out.push(Fragment::Text(&text[from..at]));
            }
            out.push(Fragment::Token(id));
            at += len;
            if vocab.attrs(id) & attr::RSTRIP != 0 {
                at += text[at..]
                    .iter()
                    .take_while(|&&byte| is_white(byte))
                    .count();
            }
            from = at;
        }
        if from < text.len() {
            out.push(Fragment::Text(&text[from..]));
        }
    }
}

/// C's `isspace`.
fn is_white(byte: u8) -> bool {
    matches!(byte, b' ' | 9..=13)
}

fn is_special(attrs: u8) -> bool {
    attrs & (attr::CONTROL | attr::USER_DEFINED | attr::UNKNOWN) != 0
}

fn by_text(vocab: &Vocab, texts: &[&str]) -> Option<u32> {
    texts.iter().find_map(|text| vocab.find(text.as_bytes()))
}

fn mark_control(vocab: &mut Vocab, id: Option<u32>) {
    if let Some(id) = id {
        vocab.attrs_mut()[id as usize] |= attr::CONTROL;
    }
}

/// Whether special tokens take the white space after them with them: Phi 3 does, and no metadata
/// says so but the model's name.
fn strips(meta: Meta<'_, '_>) -> Result<bool, TextError> {
    let name = meta
        .text("general.name")?
        .unwrap_or_default()
        .to_ascii_lowercase();
    let has = |part: &[u8]| name.windows(part.len()).any(|window| window == part);
    Ok(has(b"phi-3") || has(b"phi3"))
}

fn set_rstrip(vocab: &mut Vocab) {
    let keep = ["<unk>", "<s>", "<|endoftext|>"].map(|text| vocab.find(text.as_bytes()));
    for (id, attrs) in (0..).zip(vocab.attrs_mut()) {
        if is_special(*attrs) && !keep.contains(&Some(id)) {
            *attrs |= attr::RSTRIP;
        }
    }
}

fn shapes(vocab: &Vocab) -> Result<Box<[Shape]>, TextError> {
    let specials = (0..vocab.len()).filter(|&id| is_special(vocab.attrs(id)));
    let mut shapes: Vec<Shape> = Vec::new();
    for text in specials.map(|id| vocab.text(id)) {
        let Some(&first) = text.first() else { continue };
        let len = text.len() as u32;
        // Longest first.
        let place = shapes
            .binary_search_by(|shape| len.cmp(&shape.len))
            .unwrap_or_else(|place| {
                shapes.insert(place, Shape { len, first: [0; 4] });
                place
            });
        shapes[place].first[usize::from(first / 64)] |= 1 << (first % 64);
        if shapes.len() > SHAPES_MAX {
            let (key, max) = (
                "tokenizer.ggml.token_type: lengths of special tokens",
                SHAPES_MAX,
            );
            return Err(TextError::TooLarge {
                key,
                len: shapes.len() as u64,
                max: max as u64,
            });
        }
    }
    Ok(shapes.into())
}
