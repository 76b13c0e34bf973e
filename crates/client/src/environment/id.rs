//! What environments may be called.

/// The id of this machine.
pub const LOCAL: &str = "local";

/// The id of an environment that a variable names.
pub const REMOTE: &str = "remote";

/// Stands for no environment where an id could be.
pub(super) const NONE: &str = "none";

/// Characters that an id may have.
const MAX_ID_LENGTH: usize = 64;

/// Why an environment cannot be called so.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EnvironmentIdError {
    /// Too long, too short, or of other characters.
    #[error("`{0}` is no id: those are 1 to 64 letters, digits, `-` and `_`")]
    Form(String),
    /// It stands for something else.
    #[error("`{0}` has a meaning of its own and cannot be the id of another environment")]
    Reserved(String),
}

/// Whether a machine other than this one can be called so.
///
/// # Errors
///
/// When it cannot.
pub(super) fn check(id: &str) -> Result<(), EnvironmentIdError> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    if id.is_empty() || id.len() > MAX_ID_LENGTH || !id.bytes().all(plain) {
        return Err(EnvironmentIdError::Form(id.chars().take(80).collect()));
    }
    if id == LOCAL || id.eq_ignore_ascii_case(NONE) {
        return Err(EnvironmentIdError::Reserved(id.to_owned()));
    }
    Ok(())
}
