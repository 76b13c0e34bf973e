use proptest::prelude::*;
use serde_json::json;

use super::*;

const HS256: &str = r#"{"alg":"HS256"}"#;

fn secret() -> Secret {
    "s".repeat(32).into()
}

/// Verifies a token with this header and these claims, signed with the right secret.
fn verified(header: &str, claims: &str) -> Result<VerifiedClaims, JwtError> {
    let token = sign_text(header, claims, &secret());
    ParsedToken::parse(token.expose(), &[SignatureAlgorithm::Hs256])?
        .verify(&[VerificationKey::hmac(&secret())])
}

#[test]
fn headers_with_other_types_extensions_or_algorithms_are_refused() {
    let claims = r#"{"exp":1}"#;
    for good in [
        HS256,
        r#"{"alg":"HS256","typ":"JWT"}"#,
        r#"{"alg":"HS256","typ":"at+jwt","kid":"any","x":[1]}"#,
    ] {
        assert!(verified(good, claims).is_ok(), "{good}");
    }
    for (header, error) in [
        (r#"{"alg":"none"}"#, JwtError::Algorithm("none".to_owned())),
        (
            r#"{"alg":"hs256"}"#,
            JwtError::Algorithm("hs256".to_owned()),
        ),
        (
            r#"{"alg":"RS256"}"#,
            JwtError::Algorithm("RS256".to_owned()),
        ),
        (r#"{"alg":["HS256"]}"#, JwtError::Malformed),
        (r#"{"alg":"HS256","alg":"HS256"}"#, JwtError::Malformed),
        (r#"{"alg":"HS256","crit":["b64"]}"#, JwtError::Malformed),
        (r#"{"alg":"HS256","crit":null}"#, JwtError::Malformed),
        (r#"{"alg":"HS256","kid":null}"#, JwtError::Malformed),
        (r#"{"alg":"HS256","kid":1}"#, JwtError::Malformed),
        (r#"{"alg":"HS256","typ":null}"#, JwtError::Malformed),
        ("{}", JwtError::Malformed),
        ("[]", JwtError::Malformed),
        ("", JwtError::Malformed),
    ] {
        assert_eq!(verified(header, claims), Err(error), "{header}");
    }
}

#[test]
fn registered_claims_of_the_wrong_type_are_refused() {
    let read = |more: &str| verified(HS256, &format!(r#"{{"exp":9{more}}}"#));
    for good in [
        "",
        r#","nbf":1,"iat":2"#,
        r#","aud":[]"#,
        r#","aud":["a","b"]"#,
        r#","sub":"é","jti":"x","other":null"#,
    ] {
        assert!(read(good).is_ok(), "{good}");
    }
    let wrong = ["null", "true", "1.5", "1.0", "1e3", r#""1""#, "[1]", "{}"];
    for name in ["nbf", "iat"] {
        for value in wrong {
            let claims = format!(r#","{name}":{value}"#);
            assert_eq!(read(&claims), Err(JwtError::Claim(name)), "{claims}");
        }
    }
    for name in ["iss", "jti", "sub", "aud"] {
        for value in ["null", "true", "1", "{}", "[1]", r#"["a",null]"#] {
            let claims = format!(r#","{name}":{value}"#);
            assert_eq!(read(&claims), Err(JwtError::Claim(name)), "{claims}");
        }
    }
    for value in wrong {
        let claims = format!(r#"{{"exp":{value}}}"#);
        assert_eq!(
            verified(HS256, &claims),
            Err(JwtError::Claim("exp")),
            "{claims}"
        );
    }
    assert_eq!(verified(HS256, "{}"), Err(JwtError::Claim("exp")));
    for malformed in [
        "[]",
        "1",
        "",
        r#"{"exp":1,"exp":2}"#,
        r#"{"exp":1,"a":{"b":1,"b":2}}"#,
    ] {
        assert_eq!(
            verified(HS256, malformed),
            Err(JwtError::Malformed),
            "{malformed}"
        );
    }
}

#[test]
fn subjects_that_are_empty_too_long_or_have_control_characters_are_refused() {
    let read = |subject: &str| verified(HS256, &json!({"exp": 1, "sub": subject}).to_string());
    let longest = "x".repeat(MAX_SUBJECT_BYTES);
    assert_eq!(read(&longest).unwrap().subject(), Some(&*longest));
    for bad in [
        "",
        &format!("{longest}x"),
        &"é".repeat(128),
        "a\nb",
        "a\u{7f}",
        "\u{85}",
    ] {
        assert_eq!(read(bad), Err(JwtError::Subject), "{bad:?}");
    }
}

#[test]
fn times_issuer_and_audience_are_compared() {
    let claims = verified(HS256, r#"{"exp":100,"nbf":50,"iss":"i","aud":["x","a"]}"#).unwrap();
    let check = |now, leeway| {
        claims.check(&ExpectedClaims {
            issuer: Some("i"),
            audience: Some("a"),
            now,
            leeway,
        })
    };
    assert_eq!(check(100, 0), Ok(()));
    assert_eq!(check(101, 0), Err(JwtError::Expired));
    assert_eq!(check(130, 30), Ok(()));
    assert_eq!(check(131, 30), Err(JwtError::Expired));
    assert_eq!(check(49, 0), Err(JwtError::NotYet));
    assert_eq!(check(i64::MIN, i64::MAX), Err(JwtError::NotYet));
    let expected = ExpectedClaims {
        now: 60,
        ..ExpectedClaims::default()
    };
    assert_eq!(claims.check(&expected), Ok(()));
    let issuer = Some("other");
    assert_eq!(
        claims.check(&ExpectedClaims { issuer, ..expected }),
        Err(JwtError::Issuer)
    );
    let audience = Some("other");
    assert_eq!(
        claims.check(&ExpectedClaims {
            audience,
            ..expected
        }),
        Err(JwtError::Audience)
    );
    let bare = verified(HS256, r#"{"exp":9223372036854775807}"#).unwrap();
    for now in [0, i64::MAX] {
        let leeway = i64::MAX;
        assert_eq!(
            bare.check(&ExpectedClaims {
                now,
                leeway,
                ..ExpectedClaims::default()
            }),
            Ok(())
        );
    }
    let issuer = Some("i");
    assert_eq!(
        bare.check(&ExpectedClaims { issuer, ..expected }),
        Err(JwtError::Issuer)
    );
    let audience = Some("a");
    assert_eq!(
        bare.check(&ExpectedClaims {
            audience,
            ..expected
        }),
        Err(JwtError::Audience)
    );
}

#[test]
fn token_is_verified_only_with_the_key_of_its_id() {
    let token = sign_text(r#"{"alg":"HS256","kid":"a"}"#, r#"{"exp":1}"#, &secret());
    let token = ParsedToken::parse(token.expose(), &[SignatureAlgorithm::Hs256]).unwrap();
    let key = |id: Option<&str>, text: &str| VerificationKey {
        id: id.map(str::to_owned),
        ..VerificationKey::hmac(&text.repeat(32).into())
    };
    assert!(
        token
            .verify(&[key(Some("b"), "t"), key(Some("a"), "s")])
            .is_ok()
    );
    assert!(token.verify(&[key(None, "t"), key(None, "s")]).is_ok());
    assert_eq!(
        token.verify(&[key(Some("b"), "s")]),
        Err(JwtError::UnknownKey)
    );
    assert_eq!(token.verify(&[key(None, "t")]), Err(JwtError::UnknownKey));
    assert_eq!(
        token.verify(&[key(Some("a"), "t")]),
        Err(JwtError::Signature)
    );
    assert_eq!(token.verify(&[]), Err(JwtError::UnknownKey));
}

#[test]
fn secrets_do_not_appear_in_debug_output() {
    let shown = format!("{:?}", VerificationKey::hmac(&"hunter2".repeat(5).into()));
    assert!(!shown.contains("hunter2"), "{shown}");
}

/// JSON of any type, as an attacker or a careless issuer might put into a claim.
fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        ".{0,20}".prop_map(Value::from),
        "x{250,260}".prop_map(Value::from),
    ];
    leaf.prop_recursive(2, 8, 3, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
            prop::collection::hash_map("[a-z]{0,3}", inner, 0..3)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn any_text_is_parsed_without_panic_and_never_verifies(
        text in prop_oneof![".*", "[A-Za-z0-9_.=-]{0,200}", "eyJhbGciOiJIUzI1NiJ9\\.[A-Za-z0-9_-]{0,80}\\.[A-Za-z0-9_-]{43}"],
    ) {
        let _ = inspect(&Secret::from(&*text));
        if let Ok(token) = ParsedToken::parse(&text, &[SignatureAlgorithm::Hs256]) {
            prop_assert!(token.verify(&[VerificationKey::hmac(&secret())]).is_err());
        }
    }

    #[test]
    fn claims_of_any_type_are_accepted_only_with_their_own_type(
        members in prop::collection::btree_map(
            prop::sample::select(vec!["exp", "nbf", "iat", "iss", "aud", "sub", "jti", "x"]),
            any_json(),
            0..8,
        ),
        valid_end in any::<bool>(),
    ) {
        let mut members = members;
        if valid_end {
            members.insert("exp", json!(5));
        }
        let is = |name: &str, good: &dyn Fn(&Value) -> bool| members.get(name).is_none_or(good);
        let text = |value: &Value| value.is_string();
        let subject = |value: &Value| value.as_str().is_some_and(|text| {
            !text.is_empty() && text.len() <= 255 && !text.chars().any(char::is_control)
        });
        let audience = |value: &Value| text(value)
            || value.as_array().is_some_and(|all| all.iter().all(text));
        let good = members.get("exp").is_some_and(Value::is_i64)
            && is("nbf", &Value::is_i64) && is("iat", &Value::is_i64)
            && is("iss", &text) && is("jti", &text)
            && is("aud", &audience) && is("sub", &subject);
        let claims = verified(HS256, &serde_json::to_string(&members).unwrap());
        prop_assert_eq!(claims.is_ok(), good, "{:?}", claims);
    }

    #[test]
    fn a_token_with_any_character_changed_is_refused(
        subject in "[a-z]{1,20}",
        position in any::<prop::sample::Index>(),
        other in prop::sample::select(vec!['A', 'b', '9', '-', '_', '.', '=', ' ', 'é']),
    ) {
        let token = sign(&json!({"exp": 1, "sub": subject}), &secret()).unwrap();
        let mut characters: Vec<char> = token.expose().chars().collect();
        let position = position.index(characters.len());
        prop_assume!(characters[position] != other);
        characters[position] = other;
        let changed: String = characters.into_iter().collect();
        let claims = ParsedToken::parse(&changed, &[SignatureAlgorithm::Hs256])
            .and_then(|token| token.verify(&[VerificationKey::hmac(&secret())]));
        prop_assert!(claims.is_err(), "{changed}");
    }
}
