//! Writes the models that `tests/golden/make_logits.py` shows to llama.cpp: `golden_models DIR`
//! makes DIR/NAME.gguf for each case and prints its name and tokens.

#[path = "../tests/common/cases.rs"]
mod cases;

use std::path::PathBuf;

use leanstream::synth::vocab::Vocab;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let directory = PathBuf::from(
        std::env::args_os()
            .nth(1)
            .ok_or("usage: golden_models DIR")?,
    );
    for case in cases::all().into_iter().filter(|case| case.golden) {
        case.spec.write(
            &Vocab::BuiltIn,
            &directory.join(format!("{}.gguf", case.name)),
        )?;
        let tokens: Vec<String> = case.tokens.iter().map(u32::to_string).collect();
        println!("{} {} {}", case.name, cases::POSITIONS, tokens.join(","));
    }
    Ok(())
}
