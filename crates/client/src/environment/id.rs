//! Environment ids: reserved values and validation.

/// Id of this machine.
pub const LOCAL: &str = "local";

/// Id of the environment that a variable such as `EXEC_SERVER_URL` defines.
pub const REMOTE: &str = "remote";

/// Value that means "no environment" where an id is expected.
pub(super) const NONE: &str = "none";

/// Maximum length of an id in characters.
const MAX_ID_LENGTH: usize = 64;

/// Reason why an environment id is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EnvironmentIdError {
    /// The length or a character is not allowed.
    #[error("`{0}` is not a valid environment id: 1 to 64 letters, digits, `-` and `_`")]
    Form(String),
    /// The id is reserved.
    #[error("`{0}` is reserved and cannot be the id of an environment")]
    Reserved(String),
}

/// Validates the id of an environment other than this machine.
///
/// # Errors
///
/// When the id is invalid or reserved.
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
