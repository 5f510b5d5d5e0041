//! Signatures of policies: the public keys whose owners may sign, and who signed a bundle.

use minisign_verify::{PublicKey, Signature};

use crate::error::Error;

/// Who signed a bundle.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Signer {
    /// Nobody.
    #[default]
    Nobody,
    /// Somebody: no keys are configured with which the signature could be verified.
    Unknown,
    /// The owner of this public key, which is trusted.
    Key(String),
}

/// Whose policies are accepted.
#[derive(Default)]
pub struct Trust {
    keys: Vec<(String, PublicKey)>,
    allow_unsigned: bool,
}

impl Trust {
    /// The trust that `policy.trusted_keys` and `policy.allow_unsigned` describe.
    ///
    /// # Errors
    /// [`Error::Config`] names the entry of `trusted_keys` that is not a public key, or
    /// `allow_unsigned` if there are no keys.
    pub fn new(trusted_keys: &[String], allow_unsigned: bool) -> Result<Self, Error> {
        let key = |text: &String| match PublicKey::from_base64(text) {
            Ok(key) => Ok((text.clone(), key)),
            Err(error) => Err(Error::Config {
                field: "policy.trusted_keys",
                problem: format!(
                    "`{text}` is not a public key ({error}); it is the last line of a file that `steersman \
                     policy keygen` or minisign writes"
                ),
            }),
        };
        let keys = trusted_keys.iter().map(key).collect::<Result<Vec<_>, _>>()?;
        if keys.is_empty() && allow_unsigned {
            let problem = "has no effect without policy.trusted_keys; remove it".into();
            return Err(Error::Config { field: "policy.allow_unsigned", problem });
        }
        Ok(Self { keys, allow_unsigned })
    }

    /// Accepts `what`, which has no signature, if unsigned policies are accepted.
    ///
    /// # Errors
    /// The problem, and what to do.
    pub(crate) fn unsigned(&self, what: &str) -> Result<Signer, String> {
        if self.keys.is_empty() || self.allow_unsigned {
            return Ok(Signer::Nobody);
        }
        Err(format!(
            "{what} is not signed, and policy.trusted_keys names who may sign; sign it with `steersman policy \
             bundle --key`, or set policy.allow_unsigned = true"
        ))
    }

    /// Verifies the signature of `signed`; returns who signed it.
    ///
    /// # Errors
    /// The problem, to be read after the name of the bundle.
    pub(crate) fn verify(&self, signature: &str, signed: &[u8]) -> Result<Signer, String> {
        let signature = Signature::decode(signature)
            .map_err(|error| format!("its signature cannot be read: {error}"))?;
        if self.keys.is_empty() {
            return Ok(Signer::Unknown);
        }
        let mut problem = String::new();
        for (text, key) in &self.keys {
            match key.verify(signed, &signature, false) {
                Ok(()) => return Ok(Signer::Key(text.clone())),
                Err(minisign_verify::Error::UnexpectedKeyId) => {}
                Err(error) => problem = format!(" (key {text}: {error})"),
            }
        }
        Err(match problem.as_str() {
            "" => "it is signed, but by no key of policy.trusted_keys".into(),
            problem => format!("its signature does not fit its content{problem}"),
        })
    }
}
