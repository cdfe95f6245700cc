//! Pre-tokenizers: how each `tokenizer.ggml.pre` cuts text into the words that byte-pair merging may
//! not cross. The regular expressions of the model families are written out by hand, because a
//! regular-expression engine's tables would not fit the budget; the comments give each expression.
//!
//! Every splitter covers its text: the words, joined, are the text. They look at code points
//! ([`super::unicode`]); bytes that aren't UTF-8 count as symbols and stay in their word unchanged.

use super::unicode::{Class, class, code_point};

/// What a pre-tokenizer's name stands for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rule {
    /// How text is cut.
    pub split: Split,
    /// A word that is a token as a whole is not merged piece by piece.
    pub ignore_merges: bool,
    /// Whether BOS is added where the metadata doesn't say.
    pub add_bos: bool,
}

/// A way of cutting text into words.
#[derive(Clone, Copy, Debug)]
pub(super) enum Split {
    /// `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`
    Gpt2,
    /// `\p{N}` alone, then [`Split::Gpt2`].
    Digits,
    /// `[\p{P}$+<=>^~|]+`, then [`Split::Gpt2`], then `\p{N}+`, then `[0-9]{3}`.
    Default,
    /// `[\p{P}$+<=>^~|`]+`, then [`Split::Gpt2`], then `[0-9]{3}`.
    Falcon,
    /// The family that llama 3 and qwen 2 belong to.
    Words(Words),
    /// `\p{N}{1,3}`, then the words.
    TriplesThenWords(Words),
    /// `[\r\n]`, `\s?\p{L}+`, `\s?\p{P}+`, Han and Hangul runs, `\p{N}`, one after the other.
    DeepseekCoder,
    /// `\p{N}{1,3}`, Han and kana runs, then words in which punctuation may lead ASCII letters.
    Deepseek3,
}

/// `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,digits}| ?[^\s\p{L}\p{N}]+[tail]*`
/// `|\s*[\r\n]+|\s+(?!\S)|\s+`, with the variations of its fields.
#[derive(Clone, Copy, Debug)]
pub(super) struct Words {
    contractions: Contractions,
    /// Letters may include marks: `[\p{L}\p{M}]` for `\p{L}`.
    marks: bool,
    /// A word of letters ends where a lower-case ASCII letter is followed by an upper-case one.
    cased: bool,
    /// Digits to a word, at most.
    digits: usize,
    /// What may follow a run of punctuation in its word.
    tail: &'static [u8],
}

/// Where `'s` and the like stand.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Contractions {
    /// Nowhere.
    None,
    /// They are words.
    Alone,
    /// They end the word of letters that they follow.
    Suffix,
}

const QWEN2: Words = Words {
    contractions: Contractions::Alone,
    marks: false,
    cased: false,
    digits: 1,
    tail: b"\r\n",
};
const LLAMA3: Words = Words { digits: 3, ..QWEN2 };
const QWEN35: Words = Words {
    marks: true,
    ..QWEN2
};
const SEED: Words = Words { tail: b"", ..QWEN2 };
const TEKKEN: Words = Words {
    contractions: Contractions::None,
    cased: true,
    tail: b"\r\n/",
    ..QWEN2
};
const GPT4O: Words = Words {
    contractions: Contractions::Suffix,
    digits: 3,
    ..TEKKEN
};
const MINICPM5: Words = Words {
    digits: usize::MAX,
    ..QWEN2
};

const fn plain(split: Split) -> Rule {
    Rule {
        split,
        ignore_merges: false,
        add_bos: false,
    }
}

const fn whole(split: Split, add_bos: bool) -> Rule {
    Rule {
        split,
        ignore_merges: true,
        add_bos,
    }
}

/// Every supported `tokenizer.ggml.pre`, in the order in which errors list them.
pub(super) const RULES: &[(&str, Rule)] = &[
    ("default", plain(Split::Default)),
    ("gpt-2", plain(Split::Gpt2)),
    ("phi-2", plain(Split::Gpt2)),
    ("mpt", plain(Split::Gpt2)),
    ("olmo", plain(Split::Gpt2)),
    ("jais", plain(Split::Gpt2)),
    ("gigachat", plain(Split::Gpt2)),
    ("a.x-4.0", plain(Split::Gpt2)),
    ("mellum", plain(Split::Gpt2)),
    ("exaone4", plain(Split::Gpt2)),
    ("trillion", plain(Split::Gpt2)),
    ("granite-docling", plain(Split::Gpt2)),
    ("smollm", plain(Split::Digits)),
    ("starcoder", plain(Split::Digits)),
    ("refact", plain(Split::Digits)),
    ("command-r", plain(Split::Digits)),
    ("codeshell", plain(Split::Digits)),
    ("exaone", plain(Split::Digits)),
    ("minerva-7b", plain(Split::Digits)),
    ("mellum2", plain(Split::Digits)),
    ("llama-bpe", whole(Split::Words(LLAMA3), true)),
    ("llama3", whole(Split::Words(LLAMA3), true)),
    ("llama-v3", whole(Split::Words(LLAMA3), true)),
    ("falcon3", whole(Split::Words(LLAMA3), true)),
    ("falcon-h1", whole(Split::Words(LLAMA3), true)),
    ("pixtral", whole(Split::Words(LLAMA3), true)),
    ("midm-2.0", whole(Split::Words(LLAMA3), true)),
    ("lfm2", whole(Split::Words(LLAMA3), true)),
    ("dbrx", plain(Split::Words(LLAMA3))),
    ("smaug-bpe", plain(Split::Words(LLAMA3))),
    ("chatglm-bpe", plain(Split::Words(LLAMA3))),
    ("glm4", plain(Split::Words(LLAMA3))),
    ("minicpm5", whole(Split::TriplesThenWords(MINICPM5), false)),
    ("qwen2", plain(Split::Words(QWEN2))),
    ("deepseek-r1-qwen", plain(Split::Words(QWEN2))),
    ("stablelm2", plain(Split::Words(QWEN2))),
    ("hunyuan", plain(Split::Words(QWEN2))),
    ("megrez", plain(Split::Words(QWEN2))),
    ("solar-open", plain(Split::Words(QWEN2))),
    ("grok-2", plain(Split::Words(QWEN2))),
    ("kormo", plain(Split::Words(QWEN2))),
    ("f2llmv2", plain(Split::Words(QWEN2))),
    // `\s*[\r\n]` there, which takes what `\s*[\r\n]+` takes.
    ("bailingmoe", plain(Split::Words(QWEN2))),
    ("bailingmoe2", plain(Split::Words(QWEN2))),
    ("llada-moe", plain(Split::Words(QWEN2))),
    ("qwen35", plain(Split::Words(QWEN35))),
    ("seed-coder", plain(Split::Words(SEED))),
    ("tekken", whole(Split::Words(TEKKEN), true)),
    ("gpt-4o", plain(Split::Words(GPT4O))),
    ("llama4", plain(Split::Words(GPT4O))),
    ("kanana2", plain(Split::Words(GPT4O))),
    ("minimax-m2", plain(Split::Words(GPT4O))),
    ("falcon", plain(Split::Falcon)),
    ("deepseek-coder", plain(Split::DeepseekCoder)),
    ("deepseek-v3", plain(Split::Deepseek3)),
    ("hunyuan-dense", plain(Split::Deepseek3)),
    ("joyai-llm", plain(Split::Deepseek3)),
];

/// Calls `word` with each word of `text`, in order; none is empty.
pub(super) fn split(split: Split, text: &[u8], word: &mut dyn FnMut(&[u8])) {
    match split {
        Split::Gpt2 => isolate(text, gpt2, word),
        Split::Digits => isolate(text, number, &mut |part| isolate(part, gpt2, word)),
        Split::Default => isolate(text, default_punctuation, &mut |part| {
            isolate(part, gpt2, &mut |part| {
                isolate(part, numbers, &mut |part| isolate(part, three_digits, word));
            });
        }),
        Split::Falcon => isolate(text, falcon_punctuation, &mut |part| {
            isolate(part, gpt2, &mut |part| isolate(part, three_digits, word));
        }),
        Split::Words(rule) => isolate(text, |text| words(text, &rule), word),
        Split::TriplesThenWords(rule) => isolate(text, triple, &mut |part| {
            isolate(part, |text| words(text, &rule), word);
        }),
        Split::DeepseekCoder => isolate(text, newline, &mut |part| {
            isolate(part, |text| spaced(text, Class::Letter), &mut |part| {
                isolate(part, |text| spaced(text, Class::Punctuation), &mut |part| {
                    isolate(part, coder_cjk, &mut |part| isolate(part, number, word));
                });
            });
        }),
        Split::Deepseek3 => isolate(text, triple, &mut |part| {
            isolate(part, han_kana, &mut |part| isolate(part, deepseek3, word));
        }),
    }
}

/// Cuts `text` at the leftmost matches: a match is a piece, and so is what lies between two.
/// `find` gives the length of the match at the start of its argument, 0 for none; the argument is
/// never empty.
fn isolate(text: &[u8], find: impl Fn(&[u8]) -> usize, piece: &mut dyn FnMut(&[u8])) {
    let (mut from, mut at) = (0, 0);
    while at < text.len() {
        let len = find(&text[at..]);
        if len == 0 {
            at += code_point(&text[at..]).1;
            continue;
        }
        if from < at {
            piece(&text[from..at]);
        }
        piece(&text[at..at + len]);
        at += len;
        from = at;
    }
    if from < at {
        piece(&text[from..at]);
    }
}

/// The class and length in bytes of the code point at the start of `text`, if there is one.
fn first(text: &[u8]) -> Option<(Class, usize)> {
    if text.is_empty() {
        return None;
    }
    let (code, len) = code_point(text);
    Some((class(code), len))
}

/// Bytes of the longest prefix of at most `count_max` code points that `accept` takes.
fn run(text: &[u8], count_max: usize, accept: impl Fn(u32) -> bool) -> usize {
    let (mut at, mut count) = (0, 0);
    while at < text.len() && count < count_max {
        let (code, len) = code_point(&text[at..]);
        if !accept(code) {
            break;
        }
        at += len;
        count += 1;
    }
    at
}

/// [`run`] without a limit, over classes.
fn class_run(text: &[u8], accept: impl Fn(Class) -> bool) -> usize {
    run(text, usize::MAX, |code| accept(class(code)))
}

/// `\p{N}`
fn number(text: &[u8]) -> usize {
    run(text, 1, |code| class(code) == Class::Number)
}

/// `\p{N}+`
fn numbers(text: &[u8]) -> usize {
    class_run(text, |class| class == Class::Number)
}

/// `\p{N}{1,3}`
fn triple(text: &[u8]) -> usize {
    run(text, 3, |code| class(code) == Class::Number)
}

/// `[0-9][0-9][0-9]`
fn three_digits(text: &[u8]) -> usize {
    if text.len() >= 3 && text[..3].iter().all(u8::is_ascii_digit) {
        3
    } else {
        0
    }
}

/// `[\r\n]`
fn newline(text: &[u8]) -> usize {
    usize::from(matches!(text[0], b'\r' | b'\n'))
}

/// `[\p{P}$+<=>^~|]+`
fn default_punctuation(text: &[u8]) -> usize {
    run(text, usize::MAX, |code| {
        class(code) == Class::Punctuation
            || matches!(
                u8::try_from(code),
                Ok(b'$' | b'+' | b'<' | b'=' | b'>' | b'^' | b'~' | b'|')
            )
    })
}

/// `[\p{P}$+<=>^~|`]+`: all of ASCII's punctuation and symbols.
fn falcon_punctuation(text: &[u8]) -> usize {
    run(text, usize::MAX, |code| {
        class(code) == Class::Punctuation || (code < 0x80 && class(code) == Class::Symbol)
    })
}

/// `\s?\p{class}+`
fn spaced(text: &[u8], wanted: Class) -> usize {
    let space = run(text, 1, |code| class(code) == Class::Space);
    match class_run(&text[space..], |class| class == wanted) {
        0 => 0,
        len => space + len,
    }
}

/// `[一-龥ࠀ-一가-퟿]+`: U+0800 to U+9FA5 and U+AC00 to U+D7FF. llama.cpp, which this follows, takes
/// the white space of that range (U+2003, U+3000) out of it.
fn coder_cjk(text: &[u8]) -> usize {
    run(text, usize::MAX, |code| {
        matches!(code, 0x800..=0x9fa5 | 0xac00..=0xd7ff) && class(code) != Class::Space
    })
}

/// `[一-龥぀-ゟ゠-ヿ]+`: Han, Hiragana, Katakana.
fn han_kana(text: &[u8]) -> usize {
    run(
        text,
        usize::MAX,
        |code| matches!(code, 0x4e00..=0x9fa5 | 0x3040..=0x30ff),
    )
}

/// `'s|'t|'m|'d|'re|'ve|'ll`, in upper case too where `fold`.
fn contraction(text: &[u8], fold: bool) -> usize {
    if text.first() != Some(&b'\'') {
        return 0;
    }
    let letter = |at: usize| {
        let byte = text.get(at).copied().unwrap_or(0);
        if fold {
            byte.to_ascii_lowercase()
        } else {
            byte
        }
    };
    match (letter(1), letter(2)) {
        (b's' | b't' | b'm' | b'd', _) => 2,
        (b'r' | b'v', b'e') | (b'l', b'l') => 3,
        _ => 0,
    }
}

/// `\s*[\r\n]+` where `lines`, then `\s+(?!\S)`, then `\s+`: the word of white space at the start.
fn white_space(text: &[u8], lines: bool) -> usize {
    let (mut at, mut last, mut after_line) = (0, 0, 0);
    while let Some((Class::Space, len)) = first(&text[at..]) {
        last = at;
        at += len;
        if matches!(text[last], b'\r' | b'\n') {
            after_line = at;
        }
    }
    if lines && after_line > 0 {
        after_line
    } else if last > 0 && at < text.len() {
        // A word follows: the last white space belongs before it.
        last
    } else {
        at
    }
}

/// [`Split::Gpt2`].
fn gpt2(text: &[u8]) -> usize {
    let short = contraction(text, false);
    if short > 0 {
        return short;
    }
    let space = usize::from(text[0] == b' ');
    match first(&text[space..]) {
        Some((Class::Letter, _)) => space + class_run(&text[space..], |c| c == Class::Letter),
        Some((Class::Number, _)) => space + class_run(&text[space..], |c| c == Class::Number),
        Some((Class::Space, _)) | None => white_space(text, false),
        Some(_) => space + class_run(&text[space..], is_other),
    }
}

/// `[^\s\p{L}\p{N}]`
fn is_other(class: Class) -> bool {
    !matches!(class, Class::Space | Class::Letter | Class::Number)
}

/// [`Words`].
fn words(text: &[u8], rule: &Words) -> usize {
    if rule.contractions == Contractions::Alone {
        let short = contraction(text, true);
        if short > 0 {
            return short;
        }
    }
    let is_letter = |class| class == Class::Letter || (rule.marks && class == Class::Mark);

    // [^\r\n\p{L}\p{N}]?\p{L}+
    let (lead, lead_len) = code_point(text);
    let lead = class(lead);
    let skip = match lead {
        Class::Letter | Class::Number => 0,
        _ if matches!(text[0], b'\r' | b'\n') => 0,
        _ => lead_len,
    };
    let letters = &text[skip..];
    let mut len = if rule.cased {
        cased(letters)
    } else {
        class_run(letters, is_letter)
    };
    if len > 0 {
        if rule.contractions == Contractions::Suffix {
            len += contraction(&letters[len..], true);
        }
        return skip + len;
    }
    // A mark that leads no letters is a word of marks.
    if rule.marks && lead == Class::Mark {
        return lead_len;
    }

    // \p{N}{1,digits}
    if lead == Class::Number {
        return run(text, rule.digits, |code| class(code) == Class::Number);
    }

    // ` ?[^\s\p{L}\p{N}]+[tail]*`
    let space = usize::from(text[0] == b' ');
    let other = class_run(&text[space..], |class| is_other(class) && !is_letter(class));
    if other > 0 {
        let end = space + other;
        return end
            + text[end..]
                .iter()
                .take_while(|byte| rule.tail.contains(byte))
                .count();
    }

    white_space(text, true)
}

/// `X*Y+|X+Y*`, where X is a letter outside `a-z` and Y a letter outside `A-Z`; letters beyond ASCII
/// are both.
fn cased(text: &[u8]) -> usize {
    let is_letter = |code| class(code) == Class::Letter;
    let ascii = |code, upper: bool| {
        u8::try_from(code).is_ok_and(|byte: u8| {
            if upper {
                byte.is_ascii_uppercase()
            } else {
                byte.is_ascii_lowercase()
            }
        })
    };
    let uppers = run(text, usize::MAX, |code| {
        is_letter(code) && !ascii(code, false)
    });
    let lowers = run(&text[uppers..], usize::MAX, |code| {
        is_letter(code) && !ascii(code, true)
    });
    if lowers > 0 {
        return uppers + lowers;
    }
    // X* has to give letters back until one can be Y: the last beyond ASCII. Without one, X+ stands.
    match text[..uppers].iter().rposition(|byte| !byte.is_ascii()) {
        Some(last) => last + 1,
        None => uppers,
    }
}

/// `[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*`, then
/// white space. Other code points match nothing and gather between the matches.
fn deepseek3(text: &[u8]) -> usize {
    let is_word = |class| matches!(class, Class::Letter | Class::Mark);
    let is_sign = |class| matches!(class, Class::Punctuation | Class::Symbol);

    if text[0].is_ascii_punctuation() {
        let letters = text[1..]
            .iter()
            .take_while(|byte| byte.is_ascii_alphabetic())
            .count();
        if letters > 0 {
            return 1 + letters;
        }
    }
    let (lead, lead_len) = code_point(text);
    let lead = class(lead);
    let skip = match lead {
        Class::Letter | Class::Punctuation | Class::Symbol => 0,
        _ if matches!(text[0], b'\r' | b'\n') => 0,
        _ => lead_len,
    };
    let letters = class_run(&text[skip..], is_word);
    if letters > 0 {
        return skip + letters;
    }
    if lead == Class::Mark {
        return lead_len;
    }
    let space = usize::from(text[0] == b' ');
    let signs = class_run(&text[space..], is_sign);
    if signs > 0 {
        let end = space + signs;
        return end
            + text[end..]
                .iter()
                .take_while(|byte| matches!(byte, b'\r' | b'\n'))
                .count();
    }
    white_space(text, true)
}
